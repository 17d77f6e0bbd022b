"""Where the value of an option comes from."""

import json
from dataclasses import fields

import pytest

from avgpipe.cli.config import TrainConfig
from avgpipe.cli.folder import RunFolder
from avgpipe.cli.resolve import check_folder, with_sizes
from avgpipe.cli.resolve import resolve as complete
from avgpipe.plan import Plan


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)


def resolve(**asked):
    return complete(TrainConfig.of(workload="awd-lstm", **asked))


def plan_of(**asked):
    return resolve(**asked).to_plan()


def test_defaults():
    settings = resolve()
    assert (settings.preset, settings.device, settings.seed, settings.epochs) == ("tiny", "cpu", 0, 1)
    plan = settings.to_plan()
    assert (plan.system, plan.stages, plan.pipelines, plan.micro_batches) == ("avgpipe", 2, 2, 4)
    assert settings.out.startswith("runs/awd-lstm-")


def test_settings_survive_json():
    settings = resolve(target=100.0, advance=(1, 0))
    assert TrainConfig.from_json(settings.to_json()) == settings


def test_a_system_brings_its_options():
    plan = plan_of(system="gpipe")
    assert (plan.pipelines, plan.schedule) == (1, "all-forward-all-backward")
    assert plan_of(system="model-parallel").micro_batches == 1


def test_a_small_batch_makes_fewer_micro_batches_by_default():
    assert plan_of(batch_size=3).micro_batches == 3


def test_an_option_wins_over_the_plan_file(tmp_path):
    file = tmp_path / "plan.json"
    Plan(stages=4, pipelines=3, micro_batches=8, partition=[1, 2, 3], advance=[2, 2, 1, 0], period=5).save(
        file
    )
    plan = resolve(pipelines=1, plan=str(file)).to_plan()
    assert (plan.stages, plan.pipelines, plan.micro_batches, plan.period) == (4, 1, 8, 5)
    assert (plan.partition, plan.advance) == ((1, 2, 3), (2, 2, 1, 0))


def test_what_was_chosen_for_other_stages_is_forgotten(tmp_path):
    file = tmp_path / "plan.json"
    Plan(stages=4, micro_batches=8, partition=[1, 2, 3], advance=[2, 2, 1, 0]).save(file)
    plan = resolve(stages=2, plan=str(file)).to_plan()
    assert (plan.partition, plan.advance) == (None, None)


def test_another_system_replaces_what_the_plan_files_system_chose(tmp_path):
    file = tmp_path / "plan.json"
    Plan(stages=2, pipelines=2, micro_batches=4, advance=1).save(file)
    plan = resolve(system="dapple", plan=str(file)).to_plan()
    assert (plan.schedule, plan.pipelines, plan.advance, plan.stages) == ("1f1b", 1, None, 2)


def stored_run(folder, **values):
    folder.mkdir()
    settings = resolve(seed=7, batch_size=8, pipelines=3, **values)
    (folder / "run.json").write_text(settings.to_json())
    return settings


def test_a_resumed_run_keeps_its_settings(tmp_path):
    before = stored_run(tmp_path / "run", target=50.0)
    after = resolve(out=str(tmp_path / "run"), resume=True, epochs=9)
    assert (after.seed, after.batch_size, after.target, after.to_plan()) == (7, 8, 50.0, before.to_plan())
    assert (after.epochs, after.resume) == (9, True)


def test_a_resumed_run_keeps_its_optimizer_and_learning_rate(tmp_path):
    stored_run(tmp_path / "run", optimizer="muon", lr=0.5)
    again = {"out": str(tmp_path / "run"), "resume": True}
    for asked in ({}, {"optimizer": "muon", "lr": 0.5}):
        after = resolve(**again, **asked)
        assert (after.optimizer, after.lr) == ("muon", 0.5)
    with pytest.raises(
        ValueError, match=r"--lr 0.3: the run in .*run trains with 0.5, .*: leave out --lr, or"
    ):
        resolve(**again, lr=0.3)
    with pytest.raises(ValueError, match=r"--optimizer sgd: the run in .*run trains with muon"):
        resolve(**again, optimizer="sgd")


def test_a_resumed_run_keeps_the_optimizer_of_its_preset(tmp_path):
    stored_run(tmp_path / "run")
    with pytest.raises(ValueError, match=r"--optimizer adamw: the run in .*run trains with the preset's"):
        resolve(out=str(tmp_path / "run"), resume=True, optimizer="adamw")
    values = json.loads((tmp_path / "run" / "run.json").read_text())
    del values["optimizer"], values["lr"]
    (tmp_path / "run" / "run.json").write_text(json.dumps(values))  # as older versions wrote it
    assert resolve(out=str(tmp_path / "run"), resume=True, lr=0.5).lr == 0.5


def test_a_resumed_run_may_change_its_layout(tmp_path):
    stored_run(tmp_path / "run")
    plan = resolve(out=str(tmp_path / "run"), resume=True, stages=1).to_plan()
    assert (plan.stages, plan.pipelines) == (1, 3)


def under_torchrun(monkeypatch, attempt, launch="abc"):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(attempt))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", launch)


def begun(out):
    """The folder of a run that torchrun's first attempt has begun."""
    out.mkdir()
    (out / "run.json").write_text(resolve(out=str(out)).to_json())


def test_a_job_that_slurm_starts_again_goes_on_from_its_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    out = tmp_path / "run"
    begun(out)
    (out / "checkpoints" / "last").mkdir(parents=True)
    (out / "checkpoints" / "last" / "manifest.json").touch()
    for job, count, goes_on in (("12", "0", False), ("12", "1", True), ("13", "1", False)):
        monkeypatch.setenv("SLURM_JOB_ID", job)
        monkeypatch.setenv("SLURM_RESTART_COUNT", count)
        config = resolve(out=str(out))
        assert (config.is_restart, config.resume) == (goes_on, goes_on)


def test_an_attempt_of_torchrun_goes_on_from_the_checkpoint_of_the_one_before(tmp_path, monkeypatch):
    under_torchrun(monkeypatch, 0)
    out = tmp_path / "run"
    begun(out)
    (out / "checkpoints" / "last").mkdir(parents=True)
    (out / "checkpoints" / "last" / "manifest.json").touch()
    for attempt in (0, 1, 2):
        under_torchrun(monkeypatch, attempt)
        assert resolve(out=str(out)).resume == (attempt > 0)
    under_torchrun(monkeypatch, 1, launch="another")
    assert not resolve(out=str(out)).resume
    monkeypatch.delenv("RANK")
    assert not resolve(out=str(out)).resume


def test_launches_without_a_name_are_told_apart_by_their_process(tmp_path, monkeypatch):
    out = tmp_path / "run"
    under_torchrun(monkeypatch, 0, launch="none")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    begun(out)
    under_torchrun(monkeypatch, 1, launch="none")
    assert resolve(out=str(out)).is_restart
    monkeypatch.setattr("os.getppid", lambda: 1)
    assert not resolve(out=str(out)).is_restart


def test_an_attempt_of_torchrun_begins_anew_where_the_one_before_saved_nothing(tmp_path, monkeypatch):
    under_torchrun(monkeypatch, 0)
    out = tmp_path / "run"
    begun(out)
    (out / "metrics.jsonl").write_text('{"kind": "train", "batch": 0}\n')
    with pytest.raises(ValueError, match="holds another run"):
        check_folder(resolve(out=str(out)))
    under_torchrun(monkeypatch, 1, launch="another")
    with pytest.raises(ValueError, match="holds another run"):
        check_folder(resolve(out=str(out)))
    under_torchrun(monkeypatch, 1)
    settings = resolve(out=str(out))
    check_folder(settings)
    assert not settings.resume
    folder = RunFolder(out)
    folder.open(settings, settings.to_plan(), [])
    folder.close()
    assert (out / "metrics.jsonl").read_text() == ""


def test_a_run_of_another_workload_is_not_resumed(tmp_path):
    stored_run(tmp_path / "run")
    values = json.loads((tmp_path / "run" / "run.json").read_text())
    (tmp_path / "run" / "run.json").write_text(json.dumps({**values, "workload": "gnmt"}))
    with pytest.raises(ValueError, match=r"is a run of 'gnmt', not of 'awd-lstm'"):
        resolve(out=str(tmp_path / "run"), resume=True)


def test_the_launcher_decides_the_stages(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert plan_of().stages == 3
    with pytest.raises(ValueError, match="3 workers were started for a plan of 2"):
        plan_of(stages=2)


def test_advance_may_be_chosen_by_measuring():
    assert plan_of(advance="auto").advance == "auto"


def test_links_between_cuda_devices_need_some():
    with pytest.raises(ValueError, match="link 'nccl' needs device 'cuda', not 'cpu': use 'auto'"):
        resolve(link="nccl")


def test_a_run_from_before_there_were_links_is_resumed(tmp_path):
    stored_run(tmp_path / "run")
    values = json.loads((tmp_path / "run" / "run.json").read_text())
    old = {name: value for name, value in values.items() if name not in ("link", "wire_dtype")}
    (tmp_path / "run" / "run.json").write_text(json.dumps(old))
    settings = resolve(out=str(tmp_path / "run"), resume=True)
    assert (settings.link, settings.wire_dtype) == ("auto", "none")


def test_a_run_whose_plan_was_stored_apart_is_resumed(tmp_path):
    before = stored_run(tmp_path / "run")
    values = json.loads((tmp_path / "run" / "run.json").read_text())
    plan = {f.name: values.pop(f.name) for f in fields(Plan)}
    (tmp_path / "run" / "run.json").write_text(json.dumps({**values, "plan": plan}))
    settings = resolve(out=str(tmp_path / "run"), resume=True)
    assert (settings.to_plan(), settings.seed) == (before.to_plan(), 7)


def test_what_the_workload_is_asked_survives_the_way_to_the_workers(tmp_path):
    asked = {"data": str(tmp_path), "lr_scaling": "linear", "loader_workers": 2, "seed": 3, "pipelines": 3}
    asked |= {"optimizer": "muon", "lr": 0.5}
    for split in ("train", "valid", "test"):
        (tmp_path / f"{split}.txt").write_text("a b\n")
    config = TrainConfig.from_json(resolve(**asked).to_json())
    options = config.build_options(config.to_plan())
    assert (options.data, options.pretrained) == (tmp_path, None)
    assert (options.lr_scaling, options.loader_workers, options.pipelines) == ("linear", 2, 3)
    assert (options.optimizer, options.lr) == ("muon", 0.5)
    assert (options.seed, options.batch_size, options.epochs) == (3, 16, 1)


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
