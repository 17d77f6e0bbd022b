"""The cluster of the papers' evaluation, emulated: three hosts of two V100, 1 Gbit/s between hosts.

Layers take the time that their floating-point operations need at a share of the device's peak, and where it is asked
for at least what reading their weights from its memory needs: so small micro-batches cost more of it, above all in
LSTMs, which read theirs at each step. Updates take what moving their bytes needs. Between the devices of a host goes
PCIe 3; all that a host sends to others shares its one line. Plans are compared as if all times varied, by a fifth in
standard deviation: tensors that share a line do not come as regularly as simulated, and plans differ in what they have
in hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from avgpipe.planning import LayerProfile, Level, Profile, Tie
from avgpipe.planning.cluster import Cluster, Device
from benchmarks.papers.models import FLOAT_BYTES, PaperModel

HOSTS, DEVICES = 3, 2
BITS_PER_S = 1e9  # between hosts
BETWEEN_BYTES_PER_S = BITS_PER_S / 8 * 1448 / 1514  # of which a packet's headers take their part
JITTER = 0.2
WITHIN_BYTES_PER_S = 12e9  # what PCIe 3 x16 reaches of its 15.75

Line = list[tuple[int, int]]
"""Links, each from a stage to a neighbouring one."""


class Accelerator(NamedTuple):
    """What a device reaches.

    Attributes:
        name: In words.
        flop_per_s: At most, in float32.
        efficiency: The share of it that layers reach.
        bytes_per_s: Of its memory.
        memory_bytes: How much it has.
    """

    name: str
    flop_per_s: float
    efficiency: float
    bytes_per_s: float
    memory_bytes: float

    def seconds(self, flops: float, read_bytes: float = 0.0) -> float:
        """Computing and reading go on side by side."""
        return max(flops / (self.flop_per_s * self.efficiency), read_bytes / self.bytes_per_s)


V100 = Accelerator("V100, 70 % of 15.7 Tflop/s", 15.7e12, 0.7, 900e9, 16 * 2.0**30)


def profile_of(model: PaperModel, device: Accelerator = V100, *, reading: bool = False) -> Profile:
    """Make the Profile of a model on a device, as if it were measured at its batch size.

    A backward takes two forwards, one of which makes the gradient of the layer's input; the first layer, whose input is
    data, makes none.

    Args:
        model: Of a paper.
        device: That computes.
        reading: Whether products take at least what reading their weights does, which makes small micro-batches dear:
            the profile is then of 1, 2, 4, ... samples up to the batch. Otherwise all is proportional to the samples.
    """
    batch = model.batch_size
    sizes = sorted({*(2**n for n in range(batch.bit_length())), batch}) if reading else [batch]
    rows = tuple(_layer(model, n, sizes, device, reading) for n in range(len(model.layers)))
    ties = tuple(Tie(shared.layers, float(FLOAT_BYTES * shared.parameters)) for shared in model.shared)
    return Profile(model.name, device.name, tuple(sizes), rows, ties=ties, jitter=JITTER)


def _layer(
    model: PaperModel, n: int, sizes: Sequence[int], device: Accelerator, reading: bool
) -> LayerProfile:
    layer = model.layers[n]
    weights, state = FLOAT_BYTES * layer.parameters, model.optimizer_bytes * layer.parameters
    forward_s = [
        sum(device.seconds(b * product.flops, reading * product.read_bytes) for product in layer.products)
        for b in sizes
    ]
    return LayerProfile(
        layer.name,
        forward_s=tuple(forward_s),
        backward_s=tuple(2 * seconds for seconds in forward_s),
        input_backward_s=tuple(seconds if n else 0.0 for seconds in forward_s),
        held_bytes=tuple(b * layer.stored_bytes for b in sizes),
        output_bytes=tuple(b * layer.cut_bytes for b in sizes),
        parameter_bytes=float(weights),
        optimizer_bytes=float(state),
        # The step reads the gradient, reads and writes weights and state; averaging reads the reference, and reads and
        # writes the sum of the updates.
        update_s=(3 * weights + 2 * state) / device.bytes_per_s,
        elastic_s=3 * weights / device.bytes_per_s,
        handed_bytes=tuple(b * layer.handed_bytes for b in sizes),
    )


def cluster(
    memory_bytes: float | None = V100.memory_bytes, hosts: int = HOSTS, devices: int = DEVICES
) -> Cluster:
    """``hosts`` of so many devices each, with so much memory (None: unlimited); worker w is on host w // devices."""
    levels = (Level(devices, WITHIN_BYTES_PER_S), Level(hosts, BETWEEN_BYTES_PER_S))
    return Cluster((Device(memory_bytes),) * (hosts * devices), levels, f"{hosts} hosts of {devices} devices")


def shared_lines(stage_workers: Sequence[Sequence[int]], devices: int = DEVICES) -> list[Line]:
    """For each host, the links that leave it: together they carry one tensor at a time (``Costs.shared_links``).

    stage_workers: per stage its workers, all on one host.
    """
    hosts = [workers[0] // devices for workers in stage_workers]
    links = [(k, to) for k in range(len(hosts)) for to in (k - 1, k + 1) if 0 <= to < len(hosts)]
    leaving = [(hosts[k], (k, to)) for k, to in links if hosts[k] != hosts[to]]
    return [[link for host, link in leaving if host == one] for one in sorted({host for host, _ in leaving})]
