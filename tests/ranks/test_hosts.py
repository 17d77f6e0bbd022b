"""The places of commands, from variables as schedulers set them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from avgpipe.ranks.environment import STORE_FILE
from avgpipe.ranks.hosts import HostPlace, counts_of, hosts_of, place_of

# srun --nodes 3 --ntasks-per-node 2 in a batch job of five nodes: the job's values differ from the step's.
SLURM = {
    "SLURM_JOB_ID": "1731344",
    "SLURM_JOBID": "1731344",
    "SLURM_JOB_NODELIST": "gpu[07-10],login1",
    "SLURM_JOB_NUM_NODES": "5",
    "SLURM_NODELIST": "gpu[07-10],login1",
    "SLURM_NNODES": "3",
    "SLURM_NTASKS": "6",
    "SLURM_NPROCS": "6",
    "SLURM_STEP_ID": "0",
    "SLURM_STEPID": "0",
    "SLURM_STEP_NODELIST": "gpu[07,09-10]",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3)",
    "SLURM_TASKS_PER_NODE": "2(x5)",
    "SLURM_LAUNCH_NODE_IPADDR": "172.18.140.10",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURMD_NODENAME": "gpu09",
}
OF_STEP = HostPlace("gpu07", 25056, "Slurm (step 1731344.0)", 3, 6, 1, 2, "1731344.0.0")
# srun --pty bash, and a command in that shell.
INTERACTIVE = {**SLURM, "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "1"}
BATCH = {name: value for name, value in SLURM.items() if "STEP" not in name} | {"SLURM_PROCID": "0"}
OLD_SLURM = {name: value for name, value in SLURM.items() if not name.startswith("SLURM_STEP_")} | {
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_NODELIST": "gpu[07,09-10]",
}

# torchrun --nnodes 1:4 --nproc-per-node 2, three hosts there.
AGENT = {
    "MASTER_ADDR": "10.0.0.7",
    "MASTER_PORT": "29400",
    "RANK": "3",
    "WORLD_SIZE": "6",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "3",
    "ROLE_RANK": "3",
    "ROLE_WORLD_SIZE": "6",
    "TORCHELASTIC_RUN_ID": "run-1",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_MAX_RESTARTS": "3",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
OF_AGENT = HostPlace("10.0.0.7", 24893, "torchrun (MASTER_ADDR, RANK, WORLD_SIZE)", 3, 6, 1, 2)

# Kubeflow: pods of a PyTorchJob of an older and a newer operator, of one with an elastic policy, and of a TrainJob.
PYTORCHJOB = {
    "PYTHONUNBUFFERED": "0",
    "MASTER_ADDR": "lm-master-0",
    "MASTER_PORT": "23456",
    "RANK": "2",
    "WORLD_SIZE": "4",
}
OF_PYTORCHJOB = HostPlace("lm-master-0", 23456, "MASTER_ADDR, RANK, WORLD_SIZE", 2, 4)
NEWER_PYTORCHJOB = {
    **PYTORCHJOB,
    "PET_MASTER_ADDR": "lm-master-0",
    "PET_MASTER_PORT": "23456",
    "PET_NODE_RANK": "2",
    "PET_NNODES": "4",
    "PET_NPROC_PER_NODE": "auto",
}
OF_NODES = HostPlace("lm-master-0", 23456, "PET_MASTER_ADDR, PET_NODE_RANK, PET_NNODES", 2, 4)
ELASTIC = {
    "PET_RDZV_ENDPOINT": "lm-worker-0:23456",
    "PET_RDZV_BACKEND": "c10d",
    "PET_NNODES": "1:4",
    "PET_NPROC_PER_NODE": "1",
    "PET_MAX_RESTARTS": "100",
}
TRAINJOB = {
    "PET_NNODES": "4",
    "PET_NPROC_PER_NODE": "1",
    "PET_NODE_RANK": "0",
    "PET_MASTER_ADDR": "lm-node-0-0.lm",
    "PET_MASTER_PORT": "29500",
    "JOB_COMPLETION_INDEX": "0",
}
OF_TRAINJOB = HostPlace("lm-node-0-0.lm", 29500, "PET_MASTER_ADDR, PET_NODE_RANK, PET_NNODES", 0, 4)


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        pytest.param({}, None, id="nothing"),
        pytest.param(SLURM, OF_STEP, id="a task of srun"),
        pytest.param(OLD_SLURM, OF_STEP, id="an older srun"),
        pytest.param(BATCH, None, id="a batch script"),
        pytest.param(INTERACTIVE, None, id="an interactive shell"),
        pytest.param(
            {**SLURM, "MASTER_ADDR": "10.1.0.7", "MASTER_PORT": "7000", "SLURM_RESTART_COUNT": "2"},
            replace(OF_STEP, head="10.1.0.7", port=7000, job="1731344.0.2"),
            id="srun, with another address and port",
        ),
        pytest.param(AGENT, OF_AGENT, id="torchrun"),
        pytest.param({**SLURM, **AGENT}, OF_AGENT, id="torchrun under srun"),
        pytest.param({**AGENT, "RANK": "0", "WORLD_SIZE": "1"}, None, id="torchrun with one worker"),
        pytest.param({**AGENT, STORE_FILE: "/tmp/x/store"}, None, id="a process of avgpipe"),
        pytest.param(PYTORCHJOB, OF_PYTORCHJOB, id="PyTorchJob"),
        pytest.param(NEWER_PYTORCHJOB, OF_NODES, id="newer PyTorchJob"),
        pytest.param(
            ELASTIC,
            HostPlace("lm-worker-0", 23456, "PET_RDZV_ENDPOINT, PET_NNODES", None, 4),
            id="elastic PyTorchJob",
        ),
        pytest.param(TRAINJOB, OF_TRAINJOB, id="TrainJob"),
        pytest.param({**TRAINJOB, **AGENT}, OF_AGENT, id="torchrun in a TrainJob"),
        pytest.param({"MASTER_ADDR": "a", "MASTER_PORT": "1"}, None, id="an address alone"),
        pytest.param({"RANK": "1", "WORLD_SIZE": "2"}, None, id="ranks without an address"),
    ],
)
def test_the_place_that_variables_give(environ: dict[str, str], place: HostPlace | None) -> None:
    assert place_of(environ) == place


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"SLURM_STEP_NODELIST": "gpu[07"}, "'gpu[07' is no list of hosts"),
        ({"SLURM_STEP_NUM_TASKS": "six"}, "SLURM_STEP_NUM_TASKS='six' is no number"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2x3"}, "'2x3' are no numbers of tasks"),
        ({"MASTER_PORT": "auto"}, "MASTER_PORT='auto' is no number"),
        (
            {"SLURM_STEP_NODELIST": "", "SLURM_JOB_NODELIST": "", "SLURM_NODELIST": ""},
            "none of SLURM_STEP_NODELIST",
        ),
    ],
)
def test_variables_that_say_nothing_are_named(changed: dict[str, str], said: str) -> None:
    with pytest.raises(
        ValueError, match="the place of this command cannot be read from its environment: "
    ) as no:
        place_of({**SLURM, **changed})
    assert said in str(no.value)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("b", ["b"]),
        ("a[1-3,07-09],b", ["a1", "a2", "a3", "a07", "a08", "a09", "b"]),
        ("n[9-11]", ["n9", "n10", "n11"]),
        ("r[1-2]n[01-02]-ib", ["r1n01-ib", "r1n02-ib", "r2n01-ib", "r2n02-ib"]),
        ("a.example.org,10.0.0.2", ["a.example.org", "10.0.0.2"]),
    ],
)
def test_lists_of_hosts(text: str, hosts: list[str]) -> None:
    assert hosts_of(text) == hosts


@pytest.mark.parametrize(
    "text", ["", "a[", "a]", "a[1-", "a[x]", ",a", "a,", "a[1][", "a[1-x]", "a[-2]", "a[1,,2]"]
)
def test_what_is_no_list_of_hosts(text: str) -> None:
    with pytest.raises(ValueError, match="is no list of hosts"):
        hosts_of(text)


def test_numbers_of_tasks() -> None:
    assert counts_of("2(x3),1") == [2, 2, 2, 1]
    assert counts_of("4") == [4]


def test_a_rank_has_torch_s_variables() -> None:
    assert OF_STEP.rank_environment() == {
        "RANK": "3",
        "WORLD_SIZE": "6",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "gpu07",
        "MASTER_PORT": "25056",
    }
    assert HostPlace("lm-worker-0", 23456, "PET_RDZV_ENDPOINT", None, 4).rank_environment() == {}
    assert HostPlace("::1", 7000, "--at").address == "[::1]:7000"
