"""What no schedule can beat: times of one batch in seconds, from the costs of a micro-batch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Bound:
    name: str
    seconds: float


def no_bubble_s(micro_batches: int, forward_s: float, backward_s: float) -> float:
    """Every device computes all the time: M (t_f + t_b)."""
    return micro_batches * (forward_s + backward_s)


def flush_s(
    stages: int, micro_batches: int, forward_s: float, backward_s: float, transfer_s: float = 0.0
) -> float:
    """One batch after another, transfers hidden but for the fill: M (t_f + t_b) + (K-1) (t_f + t_b + 2 t)."""
    fill = (stages - 1) * (forward_s + backward_s + 2 * transfer_s)
    return no_bubble_s(micro_batches, forward_s, backward_s) + fill


def link_s(stages: int, micro_batches: int, transfer_s: float) -> float:
    """What the busiest worker sends in a batch: an inner one's activations and gradients share its line."""
    return micro_batches * transfer_s * min(stages - 1, 2)


def bounds(
    stages: int,
    micro_batches: int,
    forward_s: float,
    backward_s: float,
    activation_bytes: int,
    rate_bytes_per_s: float | None,
    measured_bytes_per_s: float | None,
) -> list[Bound]:
    """rate: of the line, None where it is unlimited. measured: what a plain transfer reached, if one was made."""
    costs = (forward_s, backward_s)
    made = [
        Bound("no bubble: M (t_f + t_b)", no_bubble_s(micro_batches, *costs)),
        Bound("flush: (M+K-1) (t_f + t_b)", flush_s(stages, micro_batches, *costs)),
    ]
    if rate_bytes_per_s is not None:
        transfer_s = activation_bytes / rate_bytes_per_s
        made += [
            Bound("flush and transfers: + 2 (K-1) t", flush_s(stages, micro_batches, *costs, transfer_s)),
            Bound("link time at line rate", link_s(stages, micro_batches, transfer_s)),
        ]
    if measured_bytes_per_s is not None:
        transfer_s = activation_bytes / measured_bytes_per_s
        made.append(Bound("link time as measured", link_s(stages, micro_batches, transfer_s)))
    return made
