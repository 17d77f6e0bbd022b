"""Translate with a model that `avgpipe train gnmt` trained: python examples/translate.py RUN "A man rides a horse." ...

RUN is the run's folder. Its checkpoint loads for any number of stages, and the translations are the same from
a pipeline (with `avgpipe run --stages 2 examples/translate.py RUN ...`, too) and from the plain layers.
"""

import sys
from pathlib import Path

from torch import nn

import avgpipe
from avgpipe.cli.config import TrainConfig
from avgpipe.tasks import build_workload
from avgpipe_lab.workloads import gnmt

folder, sentences = Path(sys.argv[1]), sys.argv[2:]
config = TrainConfig.from_json((folder / "run.json").read_text())
options = config.build_options(config.to_plan())
workload, (_, subwords) = build_workload("gnmt", options), gnmt.read("gnmt", options)

plan = avgpipe.Plan(stages=2)
with avgpipe.Pipeline(
    workload.layers, plan, loss_fn=workload.loss_fn, optimizer=workload.optimizer
) as pipeline:
    pipeline.load(folder / "checkpoints" / "best")
    translated = gnmt.translate(pipeline.predict, sentences, subwords, beam=5)
    plain = nn.Sequential(*workload.layers).eval()
    plain.load_state_dict(pipeline.state_dict())
    assert gnmt.translate(plain, sentences, subwords, beam=5) == translated
    if pipeline.world.rank == 0:
        print("\n".join(translated))
