"""Lightning's Trainer on a pipeline: a module that owns one, and the strategy that runs it on several ranks.

::

    class Classifier(PipelineModule):
        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    module = Classifier(model, Plan(stages=2, micro_batches=4), nn.CrossEntropyLoss())
    lightning.Trainer(strategy=PipelineStrategy(), max_epochs=3).fit(module, loader, validation)

Every rank runs the whole script, started by ``avgpipe run`` or torchrun; a single process runs all stages.
"""

from __future__ import annotations

from avgpipe.interop.lightning.module import PipelineModule
from avgpipe.interop.lightning.strategy import PipelineStrategy

__all__ = ["PipelineModule", "PipelineStrategy"]
