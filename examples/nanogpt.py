"""A training loop in the style of nanoGPT, on one device: gradients of several small batches added up, clipping, a
warm-up and a cosine, two groups of parameters, checkpoints. examples/nanogpt_pipeline.py is the same in stages.
"""

import math
import pathlib
import sys

import torch
from torch import nn
from torch.nn import functional as F

LAYERS, HEADS, WIDTH, BLOCK = 4, 4, 64, 32
BATCH, ACCUMULATE, STEPS, WARMUP, CLIP = 4, 4, int(sys.argv[1]) if len(sys.argv) > 1 else 200, 20, 1.0


def heads(x):
    return x.unflatten(2, (HEADS, -1)).transpose(1, 2)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        q, k, v = self.c_attn(self.ln_1(x)).split(WIDTH, 2)
        y = F.scaled_dot_product_attention(heads(q), heads(k), heads(v), is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(256, WIDTH), nn.Embedding(BLOCK, WIDTH)
        self.h = nn.ModuleList(Block() for _ in range(LAYERS))
        self.ln_f, self.lm_head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)
        nn.init.normal_(self.wte.weight, std=0.02)
        self.lm_head.weight = self.wte.weight

    def forward(self, idx, targets=None):
        t = idx.size(1)
        assert t <= BLOCK, f"a sequence of {t} is longer than {BLOCK}"
        x = self.wte(idx) + self.wpe(torch.arange(t, device=idx.device))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def get_batch():
    starts = torch.randint(len(text) - BLOCK - 1, (BATCH,))
    rows = torch.stack([text[s : s + BLOCK + 1] for s in starts])
    return rows[:, :-1], rows[:, 1:]


def schedule(step):
    if step < WARMUP:
        return (step + 1) / WARMUP
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - WARMUP) / max(1, STEPS - WARMUP)))


text = torch.tensor(list(pathlib.Path(pathlib.__file__).read_bytes()))
torch.manual_seed(0)
model = GPT()
matrices = [p for p in model.parameters() if p.dim() >= 2]
others = [p for p in model.parameters() if p.dim() < 2]
groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95))
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)

for step in range(STEPS):
    total = 0.0
    for _ in range(ACCUMULATE):
        x, y = get_batch()
        _, loss = model(x, y)
        (loss / ACCUMULATE).backward()
        total += loss.item() / ACCUMULATE
    nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    if step % 10 == 0 or step == STEPS - 1:
        print(f"step {step}: loss {total:.5f}")
        torch.save(
            {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, "ckpt.pt"
        )
