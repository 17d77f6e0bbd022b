"""transformers' Trainer on a pipeline: the same arguments, callbacks, evaluation and checkpoints.

::

    trainer = PipelineTrainer(model, args, train_dataset=texts, plan=Plan(stages=2, micro_batches=4))
    trainer.train()
    trainer.save_model("fine-tuned")

Every rank runs the whole script, started by ``avgpipe run``, torchrun or ``accelerate launch``; a single process runs
all stages. ``per_device_train_batch_size`` is the batch that all ranks train on together.
"""

from __future__ import annotations

from avgpipe.interop.hf.trainer import PipelineTrainer

__all__ = ["PipelineTrainer"]
