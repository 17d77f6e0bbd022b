"""Train with Lightning's Trainer, as two stages.

python examples/lightning_module.py, or avgpipe run --stages 2 examples/lightning_module.py.
"""

import sys

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from avgpipe import Plan
from avgpipe.interop.lightning import PipelineModule, PipelineStrategy


class Classifier(PipelineModule):
    def configure_optimizers(self):  # for each stage, whose parameters these are
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


lightning.seed_everything(0)  # every rank builds the same model and data
model = nn.Sequential(
    *(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU()),
    *(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4)),
)
x = torch.randn(1280, 8)
data = TensorDataset(x, x[:, :4].argmax(1))
train, validation = torch.utils.data.random_split(data, [1024, 256])
module = Classifier(model, Plan(stages=2, micro_batches=2), nn.CrossEntropyLoss(), clip_grad_norm=1.0)
trainer = lightning.Trainer(
    strategy=PipelineStrategy(),
    devices=1,  # of each rank
    max_epochs=4,
    default_root_dir=sys.argv[1] if len(sys.argv) > 1 else "runs/lightning",
)
trainer.fit(module, DataLoader(train, 32, shuffle=True), DataLoader(validation, 64))
if trainer.is_global_zero:
    print(f"validation loss {trainer.callback_metrics['val_loss']:.3f}")
