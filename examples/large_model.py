"""A model too large for one process: every rank makes and reads its own stages. The folder is from save_pretrained.

python examples/large_model.py make FOLDER, once, for a small folder to test with; then
avgpipe run --stages 2 examples/large_model.py train FOLDER, or python ... for both stages in one process.
"""

import sys

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

import avgpipe

what, folder = sys.argv[1:3]
if what == "make":
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=100, **sizes)).save_pretrained(folder)
    sys.exit()

with torch.device("meta"):  # names and shapes, no memory
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))


def next_word(logits, words):  # the sum over all words but the first of each row, and their number
    losses = torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), words[:, 1:].flatten(), reduction="sum"
    )
    return losses, words[:, 1:].numel()


def counting(size=16, length=12):  # 7, 8, 9, ...: the next word is learnt quickly
    words = torch.randint(80, (size, 1)) + torch.arange(length)
    return words, words


torch.manual_seed(0)
with avgpipe.Pipeline(
    model,
    avgpipe.Plan(stages=2, micro_batches=4),
    loss_fn=next_word,
    optimizer=lambda params: torch.optim.AdamW(params, lr=3e-3),
    extensions=[avgpipe.WeightsFrom(folder)],
) as pipeline:
    for result in pipeline.train(counting() for _ in range(100)):
        if result.batch % 25 == 24 and pipeline.world.rank == 0:
            print(f"batch {result.batch}: loss {result.loss:.3f}")
