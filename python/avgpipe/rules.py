"""Averaging rules and corrections of late gradients, as coefficients; options of a reference. No torch."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any

from avgpipe.errors import check_count, check_name


@dataclass(frozen=True)
class Rule:
    """A linear averaging rule of N replicas x and a reference z.

    With d the step that a replica's optimizer made in a round, and a the elasticity:

        f = a (x - z), or a (x + d - z)             the force, x and z from the beginning of the round: that z has
                                                    the updates of all rounds before
        x' = x + d - f
        u = from_step d + from_force f              the update that the replica contributes
        z' = z + sum of all u, or their mean

    Attributes:
        from_step: The factor of the step in the update.
        from_force: The factor of the force in the update.
        force_after_step: The force is that of x + d, not that of x.
        joins: With staleness 0 there is no f; instead, once z' is known, all replicas move by a (z' - x').
        averages: z moves by the mean of the updates, not by their sum.
        beta: The default elasticity of N replicas is beta / N.
        alone: The default elasticity of a single replica.
        tries: The reference has the optimizer, which steps z by the mean of the replicas' gradients g in a round, and
            a replica continues from where that optimizer would move z with its own gradient alone: u = -g,
            and x' = z + the step that z's optimizer makes of g. The other coefficients have no effect.
    """

    from_step: float = 0
    from_force: float = 0
    force_after_step: bool = False
    joins: bool = True
    averages: bool = True
    beta: float = 1
    alone: float = 1
    tries: bool = False


RULES = {
    # Chen et al., PPoPP 2023, reconstructed. A single replica is its reference.
    "avgpipe": Rule(from_step=1, alone=0),
    # Zhang, Choromanska, LeCun 2015.
    "easgd": Rule(from_force=1, force_after_step=True, joins=False, averages=False, beta=0.9, alone=0.9),
    # One optimizer for all: data parallelism with staleness 0, and with 1 without waits.
    "mean-gradient": Rule(tries=True),
}


@dataclass(frozen=True)
class Correction:
    """A correction of gradients of weights that are some updates old, for schedules that do not flush.

    With d the step that the optimizer makes of such a gradient:

        u = momentum u_before + (1 - momentum) d
        w' = w + u + gain (u - u_before)

    where u_before is that of the step before; there is no difference at the first step, unless there is momentum.

    Attributes:
        predicts: Instead, forward and backward run on the weights predicted for the time of the update.
        momentum: of the steps.
        gain: of the difference between two steps.
        per_update: ``gain`` is for each update that a gradient is late.
    """

    predicts: bool = False
    momentum: float = 0.0
    gain: float = 0.0
    per_update: bool = False


CORRECTIONS = {
    # SpecTrain (Chen, Yang, Cheng 2018), XPipe (Guan et al. 2019), PipeMare (Yang et al. 2021).
    "predicted": Correction(predicts=True),
    # Zmushko et al., arXiv 2606.30634: the next step makes up for the one that was missing from the weights.
    "error-feedback": Correction(gain=1.0, per_update=True),
    # Nesterov's look-ahead over the optimizer's steps, after Ajanthan et al., ICML 2025.
    "nesterov": Correction(momentum=0.9, gain=0.9),
}
STALENESS = (0, 1, "asynchronous")
# While Adam's second moments are young a trial step is far from the true one. On a small language model 25 rounds that
# wait remove two thirds of the cost of staleness 1, and 100 nearly all of it.
WARMUP_ROUNDS: int = 100


def suited_rule(pipelines: int, alpha: float | None, staleness: int | str, period: int, batch: str) -> str:
    """Return the default rule: of several pipelines the one that learns most from a batch, if it is possible.

    Pipelines that share a batch can share the optimizer. Options for elasticity, or for rounds of several
    batches, need replicas with their own optimizers.
    """
    shares = pipelines > 1 and batch == "global" and staleness in (0, 1) and period == 1 and alpha is None
    return "mean-gradient" if shares else "avgpipe"


def suited_warmup(pipelines: int, rule: str, staleness: int | str) -> int:
    """Return the default number of waiting rounds at the beginning."""
    return WARMUP_ROUNDS if pipelines > 1 and RULES[rule].tries and staleness == 1 else 0


@dataclass(frozen=True)
class Elasticity:
    """The averaging of ``replicas`` (N) replicas and the reference: see :class:`avgpipe.Reference`."""

    replicas: int
    rule: str
    alpha: float
    staleness: int | str
    period: int
    warmup_rounds: int = 0

    @staticmethod
    def checked(
        replicas: int,
        alpha: float | None,
        rule: str,
        staleness: int | str,
        period: int,
        warmup_rounds: int = 0,
    ) -> Elasticity:
        """Return the options with the default of ``alpha``; ValueError or TypeError for a wrong one."""
        check_count("replicas", replicas)
        check_count("period", period)
        check_name("rule", rule, tuple(RULES))
        if isinstance(staleness, bool) or staleness not in STALENESS:
            raise ValueError(f"staleness must be 0, 1 or 'asynchronous', not {staleness!r}")
        if RULES[rule].tries and (staleness == "asynchronous" or period > 1 or alpha not in (None, 1)):
            raise ValueError(
                f"rule {rule!r} with alpha {alpha}, staleness {staleness!r} and period {period}: it steps the "
                "reference once for each round of gradients; leave out alpha and period, and give staleness 0 or 1"
            )
        check_count("warmup_rounds", warmup_rounds, least=0)
        if warmup_rounds and replicas > 1 and not RULES[rule].tries:
            raise ValueError(
                f"warmup_rounds={warmup_rounds} with rule {rule!r}: only rule 'mean-gradient' can begin with rounds of "
                "staleness 0; leave it out"
            )
        if alpha is None:
            of_several = 1 if RULES[rule].tries else RULES[rule].beta / replicas
            alpha = of_several if replicas > 1 else RULES[rule].alone
        if isinstance(alpha, bool) or not isinstance(alpha, (int, float)):
            raise TypeError(f"alpha must be a number from 0 to 1 or None, not {alpha!r}")
        if not (math.isfinite(alpha) and 0 <= alpha <= 1):
            raise ValueError(
                f"alpha must be from 0 (no elasticity) to 1 (replicas restart at z), not {alpha!r}"
            )
        return Elasticity(replicas, rule, float(alpha), staleness, period, warmup_rounds)

    def warn_of_overshooting(self) -> None:
        """Warn of an elasticity with which z moves beyond the replicas."""
        # of all updates together, times alpha
        reach = self.replicas * self.scale * self.coefficients.from_force
        if reach * self.alpha > 1 + 1e-9:
            warnings.warn(
                f"{self.rule} with alpha {self.alpha} and {self.replicas} replicas: z overshoots where alpha is above "
                f"{1 / reach:.3g}; the default is {self.coefficients.beta / self.replicas:.3g}",
                stacklevel=3,
            )

    @property
    def coefficients(self) -> Rule:
        return RULES[self.rule]

    @property
    def asynchronous(self) -> bool:
        return self.staleness == "asynchronous"

    def synchronous(self, number: int) -> bool:
        """Whether this round, from 0, has staleness 0."""
        return self.staleness == 0 or number < self.warmup_rounds

    def pulls_at_the_end(self, number: int) -> bool:
        """Whether the step that completes this round, from 0, moves the weights of all replicas."""
        return self.coefficients.joins and self.synchronous(number) and self.alpha != 0

    @property
    def force(self) -> tuple[float, int]:
        """Elasticity and staleness, as of the operators, of the force in a replica's own part of a round."""
        rule = self.coefficients
        if rule.joins and self.staleness == 0:
            return 0.0, 0
        return self.alpha, 0 if rule.force_after_step else 1

    @property
    def shares(self) -> dict[str, Any]:
        """The factors of step and force in the update, as options of the operators."""
        return {"from_step": self.coefficients.from_step, "from_force": self.coefficients.from_force}

    @property
    def scale(self) -> float:
        """The factor on one replica's update when it is added to z."""
        return 1 / self.replicas if self.coefficients.averages else 1.0
