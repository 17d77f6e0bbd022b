"""Four replicas against one with equally many steps: nats per byte of held-out files of Python's own library."""

import copy
import pathlib

import torch

from avgpipe import ElasticAveraging, Reference

files = [torch.tensor(list(f.read_bytes())) for f in sorted(pathlib.Path(copy.__file__).parent.glob("*.py"))]
train, held_out = torch.cat([f for n, f in enumerate(files) if n % 10]), torch.cat(files[::10])


def loss(model, data, batch):  # of the byte that follows 12 others
    text = data[torch.randint(len(data) - 12, (batch, 1)) + torch.arange(13)]
    return torch.nn.functional.cross_entropy(model(text[:, :12]), text[:, 12])


def fit(replicas, lr, steps=1000, seed=0):
    torch.manual_seed(seed)
    layers = torch.nn.Embedding(256, 16), torch.nn.Flatten(), torch.nn.Linear(192, 128), torch.nn.ReLU()
    models = [torch.nn.Sequential(*layers, torch.nn.Linear(128, 256))]
    models += [copy.deepcopy(models[0]) for _ in range(replicas - 1)]
    reference = Reference(models[0].parameters(), replicas)
    opts = [
        ElasticAveraging(torch.optim.AdamW(m.parameters(), lr), reference, i) for i, m in enumerate(models)
    ]
    for model, opt in list(zip(models, opts)) * steps:
        loss(model, train, 32).backward()
        opt.step()
        opt.zero_grad()
    with reference.applied_to(models[0]), torch.no_grad():
        return loss(models[0], held_out, 50_000).item()


if __name__ == "__main__":
    print({n: {lr: round(fit(n, lr), 3) for lr in (0.002, 0.004, 0.008, 0.016)} for n in (1, 4)})
