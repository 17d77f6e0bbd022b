"""Fine-tune a model with transformers' Trainer, as two stages.

python examples/hf_trainer.py, avgpipe run --stages 2 examples/hf_trainer.py, or accelerate launch with two processes.
The model is a small GPT-2 of random weights, as from_pretrained would return it, and the text Python's own source.
"""

import argparse
import inspect
import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments, set_seed

from avgpipe import Plan
from avgpipe.interop.hf import PipelineTrainer

set_seed(0)  # every rank builds the same model
sizes = {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 64}
model = GPT2LMHeadModel(GPT2Config(vocab_size=256, bos_token_id=0, eos_token_id=0, **sizes))
tokens = torch.tensor(list(inspect.getsource(argparse).encode()[: 64 * 480]))  # a byte each
texts = [{"input_ids": x, "labels": x} for x in tokens.view(-1, 64)]
args = TrainingArguments(
    output_dir=sys.argv[1] if len(sys.argv) > 1 else "runs/hf-trainer",
    per_device_train_batch_size=16,  # of all ranks together
    learning_rate=3e-3,
    num_train_epochs=3,
    lr_scheduler_type="cosine",
    logging_steps=10,
    eval_strategy="epoch",
    save_strategy="epoch",
    use_cpu=not torch.cuda.is_available(),
    report_to="none",
)
plan = Plan(stages=2, micro_batches=4)
trainer = PipelineTrainer(model, args, train_dataset=texts[:-32], eval_dataset=texts[-32:], plan=plan)
trainer.train()  # resume_from_checkpoint=True continues from the last checkpoint
trainer.save_model()  # for from_pretrained
