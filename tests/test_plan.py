from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from avgpipe import Plan
from avgpipe.planning import Partition
from avgpipe.systems import SYSTEMS, check_systems, with_sizes


def test_a_plan_survives_its_file(tmp_path: Path) -> None:
    plan = Plan(
        stages=3, pipelines=2, micro_batches=4, advance=[2, 1, 0], partition=[1, 4], staleness="asynchronous"
    )
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_system_has_a_plan(system: str) -> None:
    plan = Plan.for_system(system, stages=3)
    assert plan.system == system
    assert plan.workers == 3


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"stages": 0}, "stages=0: must be an int of at least 1"),
        ({"pipelines": 1.5}, "pipelines=1.5: must be an int"),
        ({"micro_batches": True}, "micro_batches=True: must be"),
        ({"schedule": "1f2b"}, "did you mean '1f1b'"),
        ({"system": "gpip"}, "did you mean 'gpipe'"),
        ({"rule": "easdg"}, "did you mean 'easgd'"),
        ({"recompute": "allways"}, "did you mean 'always'"),
        ({"staleness": 2}, "staleness must be 0, 1 or 'asynchronous', not 2"),
        ({"alpha": 1.5}, "alpha must be from 0 .* not 1.5"),
        ({"stages": 3, "partition": [2]}, "names 1 first layers; 3 stages need 2"),
        ({"stages": 3, "partition": [2, 2]}, "no stage may be empty"),
        ({"stages": 2, "partition": [0]}, "no stage may be empty"),
        ({"advance": -1}, "-1"),
    ],
    ids=str,
)
def test_wrong_options_are_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Plan(**options)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"schedule": "pipedream", "weights": "flush"}, "does not flush: give weights one of 'stash'"),
        ({"schedule": "1f1b", "weights": "stash"}, "which flushes: give weights 'flush'"),
        ({"schedule": "pipedream", "weights": "stush"}, "did you mean 'stash'"),
        ({"schedule": "pipedream", "pipelines": 2}, "for one pipeline, not 2"),
        ({"schedule": "pipedream-2bw", "stages": 3, "micro_batches": 2}, "2 are fewer than 3"),
        ({"stages": 2, "replication": [2]}, "must be a list of 2 numbers"),
        ({"stages": 2, "replication": [2, 0]}, "must be a list of 2 numbers"),
        ({"stages": 2, "replication": [3, 1], "micro_batches": 2}, "use at least 3 micro-batches"),
        ({"stages": 2, "replication": [2, 1], "micro_batches": 2, "advance": "auto"}, "without replicas"),
        (
            {"stages": 2, "replication": [2, 1], "micro_batches": 3, "schedule": "pipedream"},
            "use a multiple of 2",
        ),
        (
            {"stages": 2, "replication": [2, 1], "micro_batches": 2, "schedule": "zero-bubble-h1"},
            "zero-bubble-h1 takes none, leave it out or choose",
        ),
        ({"stages": 3, "schedule": "zero-bubble-v"}, "give a multiple of 2"),
        ({"stages": 5, "schedule": "dualpipe-v"}, "give a multiple of 2, 4 for example"),
        ({"stages": 4, "schedule": "dualpipe-v", "stages_per_worker": 2}, "dualpipe-v takes none"),
        ({"stages": 4, "stages_per_worker": 2}, "takes none"),
    ],
    ids=str,
)
def test_plans_that_do_not_fit_together_are_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Plan(**options)


def test_a_plan_tells_how_many_workers_it_takes() -> None:
    assert Plan(stages=3).workers == 3
    assert Plan(stages=6, schedule="interleaved-1f1b", stages_per_worker=3).workers == 2
    assert Plan(stages=6, schedule="looped-bfs", stages_per_worker=3).workers == 2
    assert Plan(stages=6, schedule="interleaved-zero-bubble").workers == 3
    assert Plan(stages=6, schedule="zero-bubble-v").workers == 3
    assert Plan(stages=6, micro_batches=5, schedule="dualpipe-v").workers == 3
    assert Plan(stages=2, replication=[2, 1], micro_batches=2).workers == 3


def test_systems_fill_in_what_depends_on_the_workers() -> None:
    parallel = Plan.for_system("data-parallel", stages=3)
    assert (parallel.stages, parallel.replication, parallel.micro_batches) == (1, (3,), 3)
    assert Plan.for_system("data-parallel", stages=1, replication=[2]).replication == (2,)
    assert Plan.for_system("ea-pipe", stages=3).pipelines == 3
    assert Plan.for_system("pipedream", stages=3).micro_batches == 1
    assert Plan.for_system("pipedream", stages=2, replication=[3, 2]).micro_batches == 6
    assert Plan.for_system("pipedream-2bw", stages=3).micro_batches == 3
    assert Plan.for_system("pipedream-2bw", stages=3, micro_batches=5).weights == "double-buffer"


@pytest.mark.parametrize("system", [name for name in SYSTEMS if name != "avgpipe"])
def test_a_name_alone_makes_no_system(system: str) -> None:
    made = Plan.for_system(system, stages=2)
    assert Plan.from_json(made.to_json()) == made
    with pytest.raises(
        ValueError, match=rf"system '{system}' has .*, and this plan .*: write Plan.for_system"
    ):
        Plan(
            stages=3, micro_batches=4, schedule="looped-bfs", pipelines=4, stages_per_worker=3, system=system
        )
    with pytest.raises(ValueError, match="schedule 'pipedream-2bw', and this plan 'advance-forward'"):
        Plan(stages=2, micro_batches=2, system="pipedream-2bw")


def test_a_system_keeps_what_defines_it() -> None:
    with pytest.raises(ValueError, match="system 'gpipe' has pipelines = 1, not 2"):
        Plan.for_system("gpipe", pipelines=2)
    with pytest.raises(ValueError, match="did you mean 'avgpipe'"):
        Plan.for_system("avgpip")


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("{", "must be JSON"),
        ("[]", "must be a JSON object, not list"),
        ('{"stagess": 2}', "did you mean 'stages'"),
    ],
)
def test_damaged_plan_files_are_refused(text: str, match: str, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(ValueError, match=match):
        Plan.load(tmp_path / "plan.json")


@pytest.mark.parametrize(
    ("system", "options", "message"),
    [
        ("pipedream-2bw", {"stages": "2"}, "stages='2': must be an int of at least 1"),
        ("data-parallel", {"stages": -1}, "stages=-1: must be an int of at least 1"),
        ("dapple", {"stages": 2, "replication": [0, 1]}, r"replication=\[0, 1\]: must be a list of 2"),
        ("dapple", {"stages": 2, "replication": [1.5, 1]}, "replication=.*: must be a list of 2"),
        ("dapple", {"stages": 2, "replication": 3}, "replication=3: must be a list of 2"),
    ],
)
def test_wrong_options_of_a_system_are_refused(system, options, message):
    with pytest.raises(ValueError, match=message):
        Plan.for_system(system, **options)


def test_a_placement_says_which_worker_runs_what() -> None:
    plan = Plan(stages=2, micro_batches=4, replication=[2, 1], placement=[[0, 2], [1]], partition=[3])
    assert (plan.placement, plan.replication, plan.partition) == (((0, 2), (1,)), (2, 1), (3,))
    assert plan.build_schedule().replicas == ((0, 2), (1,))
    assert Plan.from_json(plan.to_json()) == plan
    assert hash(Plan.from_json(plan.to_json())) == hash(plan)
    with pytest.raises(ValueError, match="placement"):
        Plan(stages=2, placement=[[0], [0]])


def test_what_a_partitioner_found_is_a_plan() -> None:
    found = Partition(
        *("dapple", 6, [2], [2, 1], [1.0, 1.0], "one batch", 1.0, 4, 3),
        placement=[[0, 2], [1]],
        system="dapple",
        micro_batches=3,
    )
    plan = found.plan()
    assert (plan.system, plan.schedule, plan.micro_batches) == ("dapple", "1f1b", 4)
    assert (plan.partition, plan.replication, plan.placement) == ((2,), (2, 1), ((0, 2), (1,)))


def test_a_double_buffer_needs_micro_batches_for_all_replicas() -> None:
    for replication in ([3, 1, 3], [1, 3, 1], [1, 1, 3], [3, 3, 3]):
        plan = {"stages": 3, "schedule": "pipedream-2bw", "replication": replication}
        with pytest.raises(ValueError, match=r"micro_batches 3 with schedule .* use more micro-batches"):
            Plan(micro_batches=3, **plan)
        assert Plan(micro_batches=6, **plan).weights == "double-buffer"


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_2bw_has_as_many_micro_batches_as_its_replicas_need(replication: list[int]) -> None:
    stages = len(replication)
    plan = Plan.for_system("pipedream-2bw", stages=stages, replication=replication)
    assert plan.build_schedule().lookahead <= 1
    fewer = plan.micro_batches - math.lcm(*replication)
    if fewer >= max(stages, *replication):
        with pytest.raises(ValueError, match="use more micro-batches"):
            Plan.for_system("pipedream-2bw", stages=stages, replication=replication, micro_batches=fewer)


# ---- sizes that a system leaves open ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("system", "asked", "batch_size", "expected"),
    [
        ("avgpipe", {}, 16, {"pipelines": 2, "micro_batches": 4}),
        ("avgpipe", {"pipelines": 3, "micro_batches": 8}, 16, {"pipelines": 3, "micro_batches": 8}),
        ("gpipe", {}, 3, {"micro_batches": 3}),
        ("pipedream-2bw", {"stages": 6}, 16, {"micro_batches": 6}),
        ("data-parallel", {}, 16, {"micro_batches": 2}),
        ("model-parallel", {}, 16, {}),
    ],
)
def test_open_sizes_have_defaults_that_the_system_can_run(
    system: str, asked: dict[str, int], batch_size: int, expected: dict[str, int]
) -> None:
    options = {"stages": 2, **asked}
    assert with_sizes(system, options, batch_size) == {**options, **expected}


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ((), "systems: unknown system ''"),
        (("gpip",), "systems: unknown system 'gpip': did you mean 'gpipe'"),
        (("gpipe", "dapple", "gpipe"), "systems: gpipe is named twice"),
    ],
)
def test_names_of_systems_are_known_and_named_once(names: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_systems("systems", names)
    check_systems("systems", tuple(SYSTEMS))
