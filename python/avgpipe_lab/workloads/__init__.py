"""The models of the papers with their data, by name, which ``avgpipe train`` and the other commands find.

torch is imported when one is built.
"""

from __future__ import annotations

import importlib
import logging
from dataclasses import dataclass, replace
from typing import Any

from avgpipe import errors
from avgpipe.errors import nearest
from avgpipe.tasks import DEFAULT_PRESET, BuildOptions, Workload, WorkloadFacts


@dataclass(frozen=True)
class BuiltIn:
    """A workload of this package, by its name and its module.

    The module has

    - PRESETS: the presets of each of its workloads by name, smallest first.
    - check(): of name, preset and options: (number of layers, Recipe); refuses what cannot be built, reading no data.
    - build(): of name, preset and options: its batches and the other fields of the Workload, the same in every process.
    - PRETRAINED: True where a folder of weights can be given.
    """

    name: str
    module: str

    @property
    def reference(self) -> str:
        return self.name

    def check(self, options: BuildOptions) -> WorkloadFacts:
        options, _, layers, recipe = self._checked(options)
        settled = {"preset": options.preset, "batch_size": recipe.batch_size, "epochs": recipe.epochs}
        return WorkloadFacts(
            self.name, str(options.preset), layers, recipe.batch_size, recipe.epochs, settled
        )

    def build(self, options: BuildOptions) -> Workload:
        options, preset, _, recipe = self._checked(options)
        training = importlib.import_module("avgpipe_lab.workloads.recipe")
        built = self._module.build(self.name, preset, options)
        workload: Workload = training.make_workload(self.name, options, recipe, *built)
        return workload

    @property
    def _module(self) -> Any:
        return importlib.import_module(f"avgpipe_lab.workloads.{self.module}")

    def _checked(self, options: BuildOptions) -> tuple[BuildOptions, Any, int, Any]:
        """The options with a preset, the preset, the number of layers, and the Recipe with the options applied."""
        options = replace(options, preset=options.preset or DEFAULT_PRESET)
        presets = self._module.PRESETS[self.name]
        if options.preset not in presets:
            names = nearest(str(options.preset), tuple(presets))
            raise ValueError(f"unknown preset {options.preset!r} of {self.name}: {names}")
        if options.pretrained is not None and not getattr(self._module, "PRETRAINED", False):
            raise ValueError(f"{self.name} has no pretrained weights to begin with: leave pretrained out")
        layers, recipe = self._module.check(self.name, presets[options.preset], options)
        return options, presets[options.preset], layers, recipe.with_options(options)


def library(name: str, user: str) -> Any:
    """Import the module ``name``, which ``user`` needs. Raises LibraryNotFound."""
    module = errors.library(name, user, "'avgpipe[workloads]'")
    logging.getLogger(name.split(".")[0]).setLevel(logging.ERROR)  # its hints are not for our users
    return module


ALEXNET = BuiltIn("alexnet", "images")
AWD_LSTM = BuiltIn("awd-lstm", "awd_lstm")
BERT = BuiltIn("bert", "bert")
GNMT = BuiltIn("gnmt", "gnmt")
GPT = BuiltIn("gpt", "gpt")
RESNET = BuiltIn("resnet", "images")
VGG = BuiltIn("vgg", "images")
