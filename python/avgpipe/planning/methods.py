"""``avgpipe.partition``: the partitioners by name."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from avgpipe.errors import nearest
from avgpipe.planning.profile import Profile
from avgpipe.planning.result import Partition

_METHODS = {
    "simulated": ("simulated", "simulated"),
    "balance": ("balance", "balanced"),
    "pipedream": ("pipedream", "pipedream"),
    "dapple": ("dapple", "dapple"),
    "2bw": ("two_bw", "two_bw"),
}


def partition_methods() -> list[str]:
    """The names that :func:`partition` knows."""
    return list(_METHODS)


def partition(
    profile: Profile, stages: int | None = None, *, method: str = "pipedream", **options: Any
) -> Partition:
    """Cut the layers of ``profile`` into stages.

    stages: K; None: what the method finds best, or up to 4 for the last two. All but "2bw", which chooses it, take
    ``micro_batch_size`` (samples; None: the largest that was measured). Their other options:

    - "pipedream" (Narayanan et al. 2019, section 3.1): the least time of the slowest stage, link or synchronisation,
      with up to ``workers`` (None: as many as stages, or 4), of which a stage may have several. ``levels``: (units,
      bytes_per_s) of each level of the network, lowest first, in place of ``workers`` and ``link``.
      ``memory_limit_bytes``: of a worker.
    - "dapple" (Fan et al. 2021, section 4): the least time of one synchronous batch of ``micro_batches``. Workers as
      for pipedream; ``levels``, at most two, are the devices of a machine and the machines.
    - "2bw" (Narayanan et al. 2021, section 4): most samples per second over width, depth, micro-batch size and
      recomputation, for ``workers`` and batches of ``batch_size`` samples. ``micro_batch_sizes`` to try; ``link``,
      ``memory_limit_bytes``, ``recompute``.
    - "balance": the dearest stage is cheapest. ``by``: "time" or "bytes".
    - "simulated": the least simulated time per batch of the schedule that will run: ``micro_batches``, ``pipelines``,
      ``schedule``, ``advance``, ``stages_per_worker``, ``recompute``, ``link``, ``memory_limit_bytes``.

    ``link``: a ``LinkProfile``; None: the profile's, and if it has none transfers count as free, which a note says.

    Raises ValueError for an unknown method, for counts that cannot be, and where nothing fits into the memory: by how
    much, and what would fit; TypeError for an option that the method does not know.
    """
    if method not in _METHODS:
        raise ValueError(f"unknown method {method!r}: {nearest(str(method), list(_METHODS))}")
    if not isinstance(profile, Profile):
        raise TypeError(
            f"profile={profile!r}: must be a Profile, make one with avgpipe.profile or Profile.load"
        )
    module, name = _METHODS[method]
    chosen = getattr(importlib.import_module(f"avgpipe.planning.{module}"), name)
    known = [p for p in inspect.signature(chosen).parameters if p not in ("profile", "stages")]
    for option, value in options.items():
        if option not in known:
            raise TypeError(
                f"{option}={value!r}: method {method!r} has no such option; {nearest(option, known)}"
            )
    found: Partition = chosen(profile, stages, **options)
    return found
