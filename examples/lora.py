"""Fine-tune the low-rank adapters of a transformers model, as two stages.

python examples/lora.py, or avgpipe run --stages 2 examples/lora.py. The model is a small Llama of random weights, as
from_pretrained would return it, and the text Python's own source.
"""

import argparse
import inspect
import sys

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments, set_seed

from avgpipe import Plan
from avgpipe.interop.hf import PipelineTrainer

set_seed(0)  # every rank builds the same model
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
base = LlamaForCausalLM(LlamaConfig(vocab_size=256, pad_token_id=0, **sizes))
adapters = LoraConfig(r=8, target_modules="all-linear", modules_to_save=["lm_head"], task_type="CAUSAL_LM")
model = get_peft_model(base, adapters)
tokens = torch.tensor(list(inspect.getsource(argparse).encode()[: 64 * 480]))  # a byte each
texts = [{"input_ids": x, "labels": x} for x in tokens.view(-1, 64)]
args = TrainingArguments(
    output_dir=sys.argv[1] if len(sys.argv) > 1 else "runs/lora",
    per_device_train_batch_size=16,  # of all ranks together
    learning_rate=1e-2,
    num_train_epochs=2,
    logging_steps=10,
    use_cpu=not torch.cuda.is_available(),
    report_to="none",
)
plan = Plan(stages=2, micro_batches=4)
trainer = PipelineTrainer(model, args, train_dataset=texts, plan=plan)
trainer.train()
trainer.save_model()  # the adapters only, for PeftModel.from_pretrained
