"""The place of a command among those that a scheduler, or a person, starts on several hosts.

Every scheduler says it in variables of its own. The rules here read them, and touch nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from zlib import crc32

from avgpipe.ranks.environment import STORE_FILE

# Below those that Linux gives to connections, net.ipv4.ip_local_port_range.
_FIRST_PORT, _PORTS = 20000, 10000
_TORCH_PORT = 29500  # torchrun's default
_RANGE = r"\d+(?:-\d+)?"  # in a list of Slurm's
# Torchrun's.
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
Environment = Mapping[str, str]


@dataclass(frozen=True)
class HostPlace:
    """Where a command stands among those of several hosts.

    Attributes:
        head: name or address of the host where the first command is.
        port: the port there at which the commands meet.
        source: says in words where this was found.
        number: of this command, from 0, which is the first one; None where the one that has the address is the first.
        count: how many commands there are, or may be; None if that is not known.
        local: number of this command among those of its host.
        local_count: how many commands its host has.
        job: names this start of the job, where its hosts usually share a folder; else empty.
    """

    head: str
    port: int
    source: str
    number: int | None = None
    count: int | None = None
    local: int = 0
    local_count: int = 1
    job: str = ""

    @property
    def address(self) -> str:
        return f"[{self.head}]:{self.port}" if ":" in self.head else f"{self.head}:{self.port}"

    def rank_environment(self) -> dict[str, str]:
        """Return the variables by which torchrun would place this command as one rank of all; none without a number."""
        if self.number is None or self.count is None:
            return {}
        numbers = (self.number, self.count, self.local, self.local_count, self.head, self.port)
        return dict(zip(RANK_VARIABLES, map(str, numbers)))


def place_of(environ: Environment) -> HostPlace | None:
    """Return the place that the variables of a scheduler give; None where this command is the only one.

    ValueError for variables that contradict themselves. A process that avgpipe has started has no place.
    """
    if STORE_FILE in environ:
        return None
    for rule in (_of_agent, _of_slurm, _of_nodes, _of_ranks, _of_endpoint):
        try:
            place = rule(environ)
        except ValueError as error:
            raise ValueError(
                f"the place of this command cannot be read from its environment: {error}"
            ) from None
        if place is not None:
            return place if place.count != 1 else None
    return None


# ---- torchrun, and Kubernetes' operators, which set its variables ----------------------------------------------------


def _of_agent(environ: Environment) -> HostPlace | None:
    """A worker of torchrun; its agent has a store at MASTER_PORT, so the commands meet at another port."""
    if not environ.get("TORCHELASTIC_RUN_ID") or not _has(environ, "RANK", "WORLD_SIZE", "MASTER_ADDR"):
        return None
    name = f"{environ['TORCHELASTIC_RUN_ID']} {environ.get('MASTER_PORT')}"
    source = "torchrun (MASTER_ADDR, RANK, WORLD_SIZE)"
    return _of_rank(environ, environ["MASTER_ADDR"], _port_for(name), source)


def _of_nodes(environ: Environment) -> HostPlace | None:
    """A host on which torchrun was to be started: a TrainJob, or a PyTorchJob of a newer operator."""
    if not _has(environ, "PET_NODE_RANK", "PET_NNODES", "PET_MASTER_ADDR"):
        return None
    port = _number(environ, "PET_MASTER_PORT", _TORCH_PORT)
    source = "PET_MASTER_ADDR, PET_NODE_RANK, PET_NNODES"
    return HostPlace(
        environ["PET_MASTER_ADDR"], port, source, _number(environ, "PET_NODE_RANK"), _most_nodes(environ)
    )


def _of_ranks(environ: Environment) -> HostPlace | None:
    """A pod of a PyTorchJob, or whatever else sets torch's variables."""
    if not _has(environ, "MASTER_ADDR", "RANK", "WORLD_SIZE"):
        return None
    port = _number(environ, "MASTER_PORT", _TORCH_PORT)
    return _of_rank(environ, environ["MASTER_ADDR"], port, "MASTER_ADDR, RANK, WORLD_SIZE")


def _of_endpoint(environ: Environment) -> HostPlace | None:
    """A pod of a PyTorchJob with an elastic policy, whose pods have no numbers."""
    if not _has(environ, "PET_RDZV_ENDPOINT", "PET_NNODES"):
        return None
    head, colon, port = environ["PET_RDZV_ENDPOINT"].rpartition(":")
    if not (colon and port.isdigit()):
        head, port = environ["PET_RDZV_ENDPOINT"], str(_TORCH_PORT)
    return HostPlace(head.strip("[]"), int(port), "PET_RDZV_ENDPOINT, PET_NNODES", None, _most_nodes(environ))


def _of_rank(environ: Environment, head: str, port: int, source: str) -> HostPlace:
    number, count = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
    local = _number(environ, "LOCAL_RANK", 0), _number(environ, "LOCAL_WORLD_SIZE", 1)
    return HostPlace(head, port, source, number, count, *local)


def _most_nodes(environ: Environment) -> int:
    """Return the most hosts of PET_NNODES, which is "4" or "1:4"."""
    most = environ["PET_NNODES"].rpartition(":")[2]
    if not most.isdigit():
        raise ValueError(f"PET_NNODES={environ['PET_NNODES']!r} is no number")
    return int(most)


# ---- Slurm -----------------------------------------------------------------------------------------------------------


def _of_slurm(environ: Environment) -> HostPlace | None:
    """A task of srun. A batch script has SLURM_PROCID too, but no step, and is the only one."""
    if not _has(environ, "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID"):
        return None
    tasks = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    names = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    nodes = next((environ[name] for name in names if environ.get(name)), "")
    if not (nodes or environ.get("MASTER_ADDR")):
        raise ValueError(f"none of {', '.join(names)} is set")
    step = f"{environ['SLURM_JOB_ID']}.{environ['SLURM_STEP_ID']}"
    port = _number(environ, "MASTER_PORT", _port_for(step))
    per_node = counts_of(environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE", "1"))
    node = _number(environ, "SLURM_NODEID", 0)
    return HostPlace(
        environ.get("MASTER_ADDR") or hosts_of(nodes)[0],
        port,
        f"Slurm (step {step})",
        _number(environ, "SLURM_PROCID"),
        _number(environ, tasks, 1),
        _number(environ, "SLURM_LOCALID", 0),
        per_node[node] if node < len(per_node) else 1,
        f"{step}.{environ.get('SLURM_RESTART_COUNT', '0')}",
    )


def hosts_of(nodelist: str) -> list[str]:
    """Expand Slurm's list of hosts: "a[1-2,07],b" is a1, a2, a07, b. ValueError for any other text."""
    parts = re.findall(rf"(?:[^,\[\]]|\[{_RANGE}(?:,{_RANGE})*\])+", nodelist)
    if not parts or ",".join(parts) != nodelist:
        raise ValueError(f"{nodelist!r} is no list of hosts, such as a[1-3,07],b")
    return [host for part in parts for host in _expanded(part)]


def _expanded(part: str) -> list[str]:
    before, bracket, rest = part.partition("[")
    if not bracket:
        return [part]
    ranges, _, after = rest.partition("]")
    numbers = [number for one in ranges.split(",") for number in _numbers(one)]
    return [before + number + more for number in numbers for more in _expanded(after)]


def _numbers(text: str) -> list[str]:
    """Return the numbers of "7" or "07-09", with their zeros."""
    first, dash, last = text.partition("-")
    return [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)] if dash else [first]


def counts_of(text: str) -> list[int]:
    """Expand Slurm's numbers of tasks of each host: "2(x3),1" is 2, 2, 2, 1. ValueError for any other text."""
    found = [re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part) for part in text.split(",")]
    if None in found:
        raise ValueError(f"{text!r} are no numbers of tasks, such as 2(x3),1")
    return [int(m[1]) for m in found if m is not None for _ in range(int(m[2] or 1))]


# ---- values ----------------------------------------------------------------------------------------------------------


def _port_for(name: str) -> int:
    """Return a port that all commands of a start find alike."""
    return _FIRST_PORT + crc32(name.encode()) % _PORTS


def _has(environ: Environment, *names: str) -> bool:
    return all(environ.get(name) for name in names)


def _number(environ: Environment, name: str, default: int | None = None) -> int:
    text = environ.get(name) or ("" if default is None else str(default))
    if not text.isdigit():
        raise ValueError(f"{name}={text!r} is no number")
    return int(text)
