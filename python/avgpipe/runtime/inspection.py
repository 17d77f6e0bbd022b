"""What a Pipeline shows of its cut, its ranks and its run."""

from __future__ import annotations

from dataclasses import asdict, replace
from html import escape
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from avgpipe.plan import Plan
from avgpipe.ranks.environment import named
from avgpipe.runtime.session import Session, recovering
from avgpipe.runtime.spec import Spec

if TYPE_CHECKING:
    import avgpipe.planning.advance
    import avgpipe.runtime.distances
    import avgpipe.timeline.timeline
    from avgpipe.model.cut import Cut


class Inspection:
    """The part of a Pipeline that reports what it is and does, and changes nothing."""

    plan: Plan
    _spec: Spec
    _session: Session

    @recovering
    def distances(self) -> avgpipe.runtime.distances.Distances:
        """Return the distances of the replicas from the reference and from each other, over the whole model.

        It reads the weights of all replicas once or twice and copies none. With one pipeline all distances are 0.
        """
        session = self._session
        if session.worker.is_sharded:
            raise ValueError(
                "distances() needs whole weights, and prepare_stage has sharded stages: they have one replica, whose "
                "distances are 0"
            )
        session.policy.come_in(session)
        with session.idle():
            return named("avgpipe.runtime.distances:gather_distances")(self._spec.model, session.worker)  # type: ignore[no-any-return]

    @property
    def advance(self) -> avgpipe.planning.advance.AdvanceChoice | None:
        """The choice of advance="auto"."""
        return None if self._session.auto is None else self._session.auto.choice

    @property
    def bounds(self) -> list[int]:
        """The first layer of each stage, then the number of layers."""
        return list(self._spec.model.bounds)

    @property
    def device(self) -> torch.device:
        """The device where this rank computes, on CUDA with its number."""
        return self._spec.device

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers of this rank: one per pipeline and stage that has trainable parameters.

        Their groups' options and their states may be changed between two batches, but not weights: with
        several pipelines the reference has them, too, and :meth:`load_state_dict` changes all. Isolated pipelines must
        all set the same options after the same result. With ``avgpipe.Copies`` options, but not states, that were
        changed are so again after a rank was replaced, and the optimizers stay the same objects.
        """
        return [r.optimizer for r in self._session.worker.trained.values() if r.optimizer is not None]

    @property
    def skipped_updates(self) -> int:
        """Updates that ``avgpipe.Precision`` left out, of pipelines with a part on this rank.

        If pipelines that share a batch leave it out together, it counts once.
        """
        worker = self._session.worker
        found = {i: lane.update.skipped for (_, i), lane in worker.lanes.items()}
        are_one = self.plan.shares > 1 and not worker.placement.is_dedicated
        return max(found.values(), default=0) if are_one else sum(found.values())

    @recovering
    def timeline(self) -> avgpipe.timeline.timeline.Timeline:
        """Return the recent steps on all ranks, with their times in seconds from the first of them."""
        with self._session.idle():
            return named("avgpipe.measure.running:gather_timeline")(self._session.worker)  # type: ignore[no-any-return]

    @recovering
    def busy_fractions(self, first_batch: int = 0) -> list[float]:
        """Return each worker's share of time spent computing, 0..1, in recorded batches from ``first_batch``.

        Cheaper than :meth:`timeline`: each worker sends one number.
        """
        with self._session.idle():
            shares: list[float] = named("avgpipe.measure.running:gather_busy")(
                self._session.worker, first_batch
            )
            return shares

    def doing(self) -> str:
        """Return what this rank is doing, in words; from any thread."""
        return (
            f"{self._session.world.name(self._session.world.rank)}: {self._session.worker.scheduler.doing()}"
        )

    def __repr__(self) -> str:
        bounds = self._spec.model.bounds
        cut = ", ".join(f"{a}..{b - 1}" for a, b in pairwise(bounds))
        return f"Pipeline({asdict(self.plan)}, layers of the stages: {cut}, device={self._spec.device})"

    def _repr_html_(self) -> str:
        """Show the plan, the layers of each stage and the device as a table in a notebook."""
        cut = [f"{a}..{b - 1}" for a, b in pairwise(self._spec.model.bounds)]
        facts = {**asdict(self.plan), "layers of the stages": ", ".join(cut), "device": self._spec.device}
        chosen = {name: value for name, value in facts.items() if value is not None and value is not False}
        cells = (f"<tr><th>{escape(n)}</th><td>{escape(str(value))}</td></tr>" for n, value in chosen.items())
        return f"<table><caption>Pipeline</caption>{''.join(cells)}</table>"

    def __str__(self) -> str:
        """Return the cut as a table: layers by name, parameters, estimated cost, and messages between stages.

        A line beneath names the kind of estimate.
        """
        cut = self._seen_cut()
        how = f"{self.plan.pipelines} pipeline{'s' * (self.plan.pipelines > 1)}, {self.plan.schedule}"
        stages = f"{len(cut.bounds) - 1} stages of {len(cut.names)} layers"
        return f"Pipeline: {stages}, {how}, on {self.device}\n{cut}"

    def _seen_cut(self) -> Cut:
        """Return the cut with the messages that stages of this process have sent so far."""
        from avgpipe.model.cut import Cut, sent

        spec = self._spec
        found = dict(spec.traffic)
        for trained in self._session.worker.trained.values():
            k, output = trained.stage.index, trained.stage.inputs.output
            if output is not None and k < self.plan.stages - 1:
                found |= sent(k, output, spec.model.skips[k])
        return replace(Cut.of(spec.named, spec.layers, spec.model.bounds, spec.estimate), traffic=found)
