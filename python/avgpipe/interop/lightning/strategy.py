"""The strategy that runs a PipelineModule in Lightning's Trainer on several ranks, and its checkpoints."""

from __future__ import annotations

import importlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from avgpipe.device import own_device
from avgpipe.interop.lightning.module import PipelineModule
from avgpipe.interop.stepwise import StageOptimizers, resume
from avgpipe.ranks.world import World, meet

# untyped on purpose: types would be checked against whichever release is installed
_accelerators: Any = importlib.import_module("lightning.pytorch.accelerators")
_precision: Any = importlib.import_module("lightning.pytorch.plugins.precision")
_strategies: Any = importlib.import_module("lightning.pytorch.strategies")
_states: Any = importlib.import_module("lightning.pytorch.trainer.states")


class PipelineStrategy(_strategies.SingleDeviceStrategy):  # type: ignore[misc]  # as its base is untyped here
    """Runs a :class:`PipelineModule`: every rank has the whole of each batch, and only the first one logs and saves.

    Use ``lightning.Trainer(strategy=PipelineStrategy(), devices=1, ...)`` on every rank; each takes its own
    CUDA device. A checkpoint has the model's weights, as a LightningModule's has, under "state_dict"; the
    state for resuming is beside it, in the folder "NAME.ckpt.pipeline":
    ``trainer.fit(module, ckpt_path="NAME.ckpt")`` resumes bit for bit, or under another plan.

    Args:
        timeout_s: Longest wait for another rank, in seconds, outside the pipeline, which has its own timeout.
    """

    def __init__(self, timeout_s: float = 300) -> None:
        super().__init__()
        self.global_rank = int(os.environ.get("RANK", "0"))
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self._timeout_s = timeout_s
        self._world: World | None = None
        self._restored: Path | None = None  # the checkpoint that training resumes from

    @property
    def root_device(self) -> torch.device:
        return own_device("cuda" if isinstance(self.accelerator, _accelerators.CUDAAccelerator) else "cpu")

    @property
    def is_global_zero(self) -> bool:
        return self.global_rank == 0

    # ---- ranks ---------------------------------------------------------------------------------------------------

    def setup_environment(self) -> None:
        super().setup_environment()
        self._world = self._world or meet(self._timeout_s)

    def barrier(self, *_: Any, **__: Any) -> None:
        if self._world is not None:
            self._world.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the value of rank ``src``, which JSON must be able to represent."""
        return obj if self._world is None or self._world.size == 1 else self._world.gather(obj)[src]

    # ---- life ----------------------------------------------------------------------------------------------------

    def setup(self, trainer: Any) -> None:
        self.accelerator.setup(trainer)
        module = self.lightning_module
        if not isinstance(module, PipelineModule):
            raise TypeError(
                f"PipelineStrategy runs a PipelineModule, not {type(module).__name__}: to cut a model, it needs the "
                "model separately from its loss"
            )
        if type(self.precision_plugin) is not _precision.Precision:
            raise ValueError(
                f"precision={self.precision_plugin.precision!r} must be set in the pipeline: leave it out, and give "
                "the module extensions=[avgpipe.Precision(autocast=torch.bfloat16)], or torch.float16"
            )
        trains = trainer.state.fn == _states.TrainerFn.FITTING
        pipeline = module.open_pipeline(self.root_device, trains)
        self.optimizers = [StageOptimizers(pipeline.optimizers)] if trains else []
        self.lr_scheduler_configs: list[Any] = []

    def batch_to_device(self, batch: Any, *_: Any, **__: Any) -> Any:
        return batch  # each stage takes what it needs

    def model_to_device(self) -> None:
        pass

    def on_train_end(self) -> None:
        self._module.take_weights()

    def teardown(self) -> None:
        if isinstance(self.lightning_module, PipelineModule):  # otherwise it was refused
            self.lightning_module.close_pipeline()
        super().teardown()

    @property
    def _module(self) -> PipelineModule:
        module: PipelineModule = self.lightning_module
        return module

    # ---- checkpoints ---------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        self._module.take_weights()
        state: dict[str, Any] = super().lightning_module_state_dict()
        return state

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None
    ) -> None:
        super().save_checkpoint(checkpoint, filepath, storage_options)
        if "optimizer_states" in checkpoint:  # otherwise it has the weights only
            self._module.pipeline.save(_beside(filepath))
        self.barrier()

    def remove_checkpoint(self, filepath: Any) -> None:
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            shutil.rmtree(_beside(filepath), ignore_errors=True)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        self._restored = _beside(os.path.realpath(checkpoint_path))  # "last" may be a link to the best one
        found: dict[str, Any] = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        return found

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        assert self._restored is not None  # by load_checkpoint
        resume(self._module.pipeline, self._restored)


def _beside(checkpoint: Any) -> Path:
    """Return the folder with the state that a checkpoint's own file lacks."""
    return Path(f"{checkpoint}.pipeline")
