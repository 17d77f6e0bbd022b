"""transformers' Trainer on a pipeline: the same arguments, callbacks, evaluation and checkpoints.

::

    trainer = PipelineTrainer(model, args, train_dataset=texts, plan=Plan(stages=2, micro_batches=4))
    trainer.train()
    trainer.save_model("fine-tuned")

Every rank runs the whole script, started by ``avgpipe run``, torchrun or ``accelerate launch``; a single process runs
all stages. ``per_device_train_batch_size`` is the batch that all ranks train on together.
"""

from __future__ import annotations

from importlib.util import find_spec

for _package in ("transformers", "accelerate"):
    if find_spec(_package) is None:
        raise ImportError(
            f"avgpipe.interop.hf needs {_package}, which is not installed: pip install transformers accelerate"
        )

from avgpipe.interop.hf.trainer import PipelineTrainer  # noqa: E402  # after what it needs has been looked for

__all__ = ["PipelineTrainer"]
