"""What fails in a save or a load costs that save or load, not the run, and never the checkpoint that is there."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from avgpipe import CheckpointError, Pipeline, Plan
from avgpipe.checkpoint import verify_checkpoint
from avgpipe.checkpoint.folder import FolderLocks
from avgpipe.checkpoint.manifest import Manifest
from tests.checkpoint.test_blocks import checksum_in
from tests.options import grouped
from tests.patience import limit
from tests.runner import Ranks, run, touch
from tests.runtime.cases import adamw, language_model, token_batches

PLAN = Plan(stages=2, pipelines=2, micro_batches=2)
LOSS = nn.CrossEntropyLoss()


def make(plan: Plan = PLAN, model: nn.Module | None = None, **options: Any) -> Pipeline:
    chosen: dict[str, Any] = {"loss_fn": LOSS, "optimizer": adamw, **options}
    return Pipeline(model or language_model(), plan, **grouped(**chosen))


def losses(p: Pipeline, count: int = 4) -> list[float]:
    return [r.loss for r in p.train(token_batches(count, 6))]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    with make() as p:
        losses(p)
        p.save(tmp_path / "c")
    return tmp_path / "c"


# ---- disks -------------------------------------------------------------------------------------------------------


class Full:
    """Stands for ``os.fsync`` of a disk that has no room left, while ``is_full``."""

    def __init__(self) -> None:
        self.is_full, self._fsync = True, os.fsync

    def __call__(self, descriptor: int) -> None:
        if self.is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._fsync(descriptor)


def test_a_full_disk_costs_the_save_alone(saved: Path, tmp_path: Path, monkeypatch: Any) -> None:
    before = sorted(p.name for p in saved.iterdir())
    with make() as undisturbed:
        expected = losses(undisturbed) + losses(undisturbed)
    with make() as p:
        found = losses(p)
        monkeypatch.setattr(os, "fsync", full := Full())
        with pytest.raises(CheckpointError) as caught:
            p.save(saved)
        assert re.fullmatch(
            rf"nothing was saved to {saved}: No space left on device: {saved}/stage-0-0-0-\w+\.pt",
            str(caught.value),
        )
        assert sorted(p.name for p in saved.iterdir()) == before
        assert verify_checkpoint(saved).batches == 4
        full.is_full = False
        found += losses(p)
        assert found == expected
        p.save(tmp_path / "elsewhere")
        p.save(saved)
    assert verify_checkpoint(saved).batches == verify_checkpoint(tmp_path / "elsewhere").batches == 8


def test_torch_says_in_its_own_words_what_the_disk_said(saved: Path, monkeypatch: Any) -> None:
    """In the middle of a file: torch.save raises another error when its writer fails."""
    opened = Path.open
    full = Path("/dev/full")
    monkeypatch.setattr(
        Path, "open", lambda path, mode="r", **more: opened(full if mode == "wb" else path, mode, **more)
    )
    with (
        make(model=wide_model()) as p,
        pytest.raises(CheckpointError, match=r"No space left on device: .*\.pt$"),
    ):
        p.save(saved)
    assert verify_checkpoint(saved).batches == 4


def wide_model() -> nn.Module:
    """A model whose tensors are larger than what a file buffers."""
    return nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 3))


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 300 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(folder)], capture_output=True, text=True
    )
    if made.returncode:
        pytest.skip(f"needs the right to mount: {made.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)  # no closed Pipeline keeps it busy


@pytest.mark.root
def test_a_disk_that_is_really_full(disk: Path) -> None:
    with make() as p:
        losses(p)
        p.save(disk / "c")
        size = sum(f.stat().st_size for f in (disk / "c").iterdir())
        (disk / "filler").write_bytes(bytes(300 * 1024 - size - 24 * 1024))
        before = sorted(f.name for f in (disk / "c").iterdir())
        with pytest.raises(
            CheckpointError, match=r"^nothing was saved to .*: No space left on device: .*\.pt$"
        ):
            p.save(disk / "c")
        assert sorted(f.name for f in (disk / "c").iterdir()) == before
        losses(p)
        (disk / "filler").unlink()
        p.save(disk / "c")
        assert verify_checkpoint(disk / "c").batches == 8


@pytest.mark.root
def test_a_folder_that_cannot_be_written(disk: Path, tmp_path: Path) -> None:
    with make() as p:
        losses(p)
        p.save(disk / "c")
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        for folder in (disk / "c", disk / "other"):
            with pytest.raises(
                CheckpointError, match=f"^nothing was saved to {folder}: Read-only file system: "
            ):
                p.save(folder)
        losses(p)
        p.save(tmp_path / "elsewhere")
        p.load(disk / "c")
        assert p.batches == 4


def test_a_file_where_the_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with make() as p:
        with pytest.raises(CheckpointError, match="is a file: name a folder"):
            p.save(tmp_path / "file")
        assert len(losses(p)) == 4


def _one_rank_has_no_room(folder: str, rank: int) -> None:
    with make() as p:
        first = losses(p)
        p.save(folder)
        if p.world.rank == rank:
            fsync, os.fsync = os.fsync, Full()
        with pytest.raises(CheckpointError, match=rf"\(rank {rank}\): No space left on device"):
            p.save(folder)
        if p.world.rank == rank:
            os.fsync = fsync
        assert first != losses(p)
        p.load(folder)
        assert p.batches == 4
        losses(p)
        p.save(folder)


@pytest.mark.ranks
@pytest.mark.parametrize("rank", [0, 1])
def test_all_ranks_agree_that_one_has_no_room(rank: int, tmp_path: Path) -> None:
    run(2, _one_rank_has_no_room, folder=str(tmp_path / "c"), rank=rank)
    assert verify_checkpoint(tmp_path / "c").batches == 8
    assert len(list((tmp_path / "c").glob("*.pt"))) == 2


# ---- loads -------------------------------------------------------------------------------------------------------


def test_a_damaged_checkpoint_costs_the_load_alone(saved: Path, tmp_path: Path) -> None:
    bad = shutil.copytree(saved, tmp_path / "bad")
    next(bad.glob("stage-1-*")).write_bytes(b"short")
    with make() as p:
        before = {name: value.clone() for name, value in p.state_dict().items()}
        with pytest.raises(CheckpointError, match=r"^nothing was loaded from .*bad: corrupt checkpoint"):
            p.load(bad)
        assert all(torch.equal(before[name], value) for name, value in p.state_dict().items())
        losses(p)
        p.load(saved)
        assert p.batches == 4
        losses(p)


def _one_rank_cannot_read(folder: str) -> None:
    with make() as p:
        with pytest.raises(
            CheckpointError, match=r"nothing was loaded from .* \(rank 1\): corrupt checkpoint"
        ):
            p.load(folder)
        losses(p)


@pytest.mark.ranks
def test_all_ranks_agree_that_one_cannot_read(saved: Path) -> None:
    next(saved.glob("stage-1-*")).write_bytes(b"short")
    run(2, _one_rank_cannot_read, folder=str(saved))


def test_a_reader_keeps_the_files_of_the_manifest_that_it_has_read(saved: Path, monkeypatch: Any) -> None:
    """A whole save between the manifest and the first file, and between two files."""
    from avgpipe.checkpoint import load

    opened = Manifest.opened
    with make() as writer:
        losses(writer, 5)
        saves = iter([True, True, False] + [False] * 100)

        def open_after_a_save(manifest: Manifest, directory: Path, number: int) -> Any:
            if number == 1 and next(saves):
                losses(writer, 1)
                writer.save(saved)
            return opened(manifest, directory, number)

        with make() as reader:
            monkeypatch.setattr(load.Manifest, "opened", open_after_a_save)
            reader.load(saved)
            assert reader.batches == 7
            losses(reader)
            assert verify_checkpoint(saved).batches == 7


def test_a_thread_that_looks_all_the_time_always_finds_a_whole_one(saved: Path) -> None:
    looks, ends = 0, threading.Event()
    failures: list[Exception] = []

    def look() -> None:
        nonlocal looks
        while not ends.is_set():
            try:
                verify_checkpoint(saved)
            except Exception as error:
                failures.append(error)
            looks += 1

    reader = threading.Thread(target=look)
    reader.start()
    with make() as p:
        for _ in range(20):
            p.save(saved)
    ends.set()
    reader.join()
    assert failures == []
    assert looks > 0


# ---- two runs ----------------------------------------------------------------------------------------------------

OTHER_RUN = """
import sys
from pathlib import Path
from avgpipe.checkpoint.folder import FolderLocks
locks = FolderLocks()
with locks.saving(Path(sys.argv[1])):
    print("held", flush=True)
sys.stdin.read()
"""


@pytest.mark.promise
def test_a_second_run_is_refused(saved: Path, tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", OTHER_RUN, str(saved)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout
    assert holder.stdout.readline() == "held\n"
    with make() as p:
        losses(p, 1)
        with pytest.raises(
            CheckpointError, match=f"another run saves into {saved}: end it, or save into another"
        ):
            p.save(saved)
        assert verify_checkpoint(saved).batches == 4
        p.load(saved)  # reading is free
        p.save(tmp_path / "other")
        holder.communicate("")
        p.save(saved)


def test_folders_that_were_deleted_keep_no_file_open(tmp_path: Path) -> None:
    locks, opened = FolderLocks(), []
    for number in range(5):  # as a trainer does that keeps the newest checkpoints
        folder = tmp_path / str(number)
        folder.mkdir()
        with locks.saving(folder):
            opened.append(len(os.listdir("/proc/self/fd")))
        shutil.rmtree(folder)
    assert opened[1:] == opened[1:2] * 4


def test_a_run_that_ends_lets_the_next_one_save(saved: Path) -> None:
    for _ in range(2):
        with make() as p:
            p.load(saved)
            losses(p)
            p.save(saved)
    assert verify_checkpoint(saved).batches == 12


@pytest.mark.ranks
@pytest.mark.slow
def test_a_folder_is_held_while_one_of_its_pipelines_lives(tmp_path: Path) -> None:
    look = (
        "import sys\nfrom pathlib import Path\nfrom avgpipe.checkpoint.folder import FolderLocks\n"
        "with FolderLocks().saving(Path(sys.argv[1])): pass"
    )

    def is_free() -> bool:
        done = subprocess.run(
            [sys.executable, "-c", look, str(tmp_path / "c")], capture_output=True, text=True
        )
        assert done.returncode == 0 or "another run saves into" in done.stderr
        return done.returncode == 0

    first, second = make(), make()
    for p in (first, second, first):
        p.save(tmp_path / "c")
    first.close()
    assert not is_free()
    second.close()
    assert is_free()


def test_pipelines_of_one_process_do_not_mix_their_files(tmp_path: Path) -> None:
    refusals, pipelines = [], [make(), make()]

    def save(p: Pipeline) -> None:
        for _ in range(15):
            try:
                p.save(tmp_path / "c")
            except CheckpointError as error:
                refusals.append(str(error))

    threads = [threading.Thread(target=save, args=(p,)) for p in pipelines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all("another Pipeline of this process saves into" in text for text in refusals)
    assert len(verify_checkpoint(tmp_path / "c").files) == 2
    for p in pipelines:
        p.save(tmp_path / "c")
        p.close()


def _saves_until_it_is_stopped(folder: str, timeout_s: float) -> None:
    with make(timeout_s=timeout_s) as p:
        while True:
            p.save(folder)
            touch("saved")


@pytest.mark.ranks
@pytest.mark.slow
def test_a_rank_that_stands_still_in_a_save_costs_the_limit_and_is_not_called_dead(tmp_path: Path) -> None:
    limit_s = 4.0
    workers = Ranks(2, _saves_until_it_is_stopped, folder=str(tmp_path / "c"), timeout_s=limit_s)
    workers.wait_for(2, "saved")
    os.kill(workers.processes[1].pid or 0, signal.SIGSTOP)
    begin = time.monotonic()
    workers.processes[0].join(limit(30))
    took = time.monotonic() - begin
    workers.kill(1)
    output = workers.join(10)[0][1]
    assert took < limit_s + limit(5)
    assert re.search(
        r"PipelineTimeout: rank 0 waited 4 s for rank 1 \(stage 1\), which does not answer", output
    ), output
    assert verify_checkpoint(tmp_path / "c").batches == 0


# ---- manifests ---------------------------------------------------------------------------------------------------


def with_checksum(values: dict[str, Any]) -> str:
    """As whoever knows the format would write it."""
    body = {name: value for name, value in values.items() if name != "crc32"}
    return json.dumps({**body, "crc32": zlib.crc32(json.dumps(body).encode())}) + "\n"


def test_every_altered_byte_is_noticed(saved: Path) -> None:
    path = saved / "manifest.json"
    text = path.read_bytes()
    dice = random.Random(3)
    for _ in range(100):
        at, bit = dice.randrange(len(text)), 1 << dice.randrange(8)
        path.write_bytes(text[:at] + bytes([text[at] ^ bit]) + text[at + 1 :])
        with pytest.raises(CheckpointError, match=r"manifest\.json"):
            verify_checkpoint(saved)


@pytest.mark.parametrize(
    "text",
    ["", "[1, 2]", "3", "[" * 100_000, '{"a":' * 100_000, "{}", '"x"', "NaN", "\x00", '{"format": "2"}'],
    ids=lambda text: text[:12],
)
def test_what_is_no_manifest_is_refused(text: str, saved: Path) -> None:
    (saved / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged"):
        verify_checkpoint(saved)


@pytest.mark.parametrize("name", ["../evil/{}", "/etc/{}", "{}\0", "./{}", "sub/{}", "..", ""])
def test_no_name_of_a_file_leaves_the_folder(name: str, saved: Path) -> None:
    values = json.loads((saved / "manifest.json").read_text())
    shutil.copytree(saved, saved.parent / "evil")
    values["files"][0][0] = name.format(values["files"][0][0])
    (saved / "manifest.json").write_text(with_checksum(values))
    with pytest.raises(CheckpointError, match=r"'files' cannot have '.*' for stage 0"):
        verify_checkpoint(saved)


@pytest.mark.parametrize("pattern", ["manifest.json", "stage-1-*"])
def test_a_folder_in_place_of_a_file_is_refused(pattern: str, saved: Path) -> None:
    path = next(saved.glob(pattern))
    path.unlink()
    path.mkdir()
    with pytest.raises(CheckpointError, match="Is a directory"):
        verify_checkpoint(saved)
    with make() as p:
        with pytest.raises(CheckpointError, match="Is a directory"):
            p.load(saved)
        losses(p)


@pytest.mark.parametrize(
    "content",
    [
        {},
        [],
        3,
        {"reference": None, "replicas": {}},
        {"reference": {}, "replicas": {0: {}}},
        {"replicas": {-1: {}}},
    ],
    ids=str,
)
@pytest.mark.parametrize("plan", [PLAN, Plan()], ids=["same plan", "other plan"])
def test_a_file_with_something_else_is_refused(content: Any, plan: Plan, saved: Path) -> None:
    shard = next(saved.glob("stage-0-*"))
    torch.save(content, shard)
    manifest = Manifest.read(saved)
    manifest.files[0] = [shard.name, shard.stat().st_size, checksum_in(shard)]
    manifest.write(saved)
    with make(plan) as p:
        with pytest.raises(CheckpointError, match=r"stage-0.* does not load"):
            p.load(saved)
        losses(p)


@pytest.mark.parametrize("plan", [PLAN, Plan()], ids=["same plan", "other plan"])
def test_a_file_without_one_of_the_replicas_is_refused(plan: Plan, saved: Path) -> None:
    shard = next(saved.glob("stage-1-*"))
    content = torch.load(shard, weights_only=True)
    del content["replicas"][1]
    torch.save(content, shard)
    manifest = Manifest.read(saved)
    manifest.files[1] = [shard.name, shard.stat().st_size, checksum_in(shard)]
    manifest.write(saved)
    with (
        make(plan) as p,
        pytest.raises(CheckpointError, match=r"does not load \(it has the pipelines \[0\]\)"),
    ):
        p.load(saved)


# ---- infinities and NaN ------------------------------------------------------------------------------------------


def test_a_run_that_came_to_nan_does_not_replace_its_checkpoint(saved: Path) -> None:
    with make(Plan(stages=2)) as p:
        p.load(saved)
        bad = token_batches(1, 6)[0]
        model = p._session.worker.trained[0, 0].arena.weights[0]
        model[0] = torch.nan
        list(p.train([bad]))
        with pytest.raises(CheckpointError, match="has infinities or NaN; load an earlier checkpoint"):
            p.save(saved)
        assert verify_checkpoint(saved).batches == 4
        p.load(saved)
        assert all(loss == loss for loss in losses(p))


@pytest.mark.parametrize(
    "after", [PLAN, Plan(stages=2), Plan(stages=1, pipelines=3, micro_batches=2)], ids=str
)
def test_a_replica_that_is_not_finite_begins_at_the_reference(
    after: Plan, tmp_path: Path, caplog: Any
) -> None:
    with make() as p:
        losses(p)
        for seat in (0, 1):
            p._session.worker.trained[seat, 0].arena.weights[0].fill_(torch.nan)
        losses(p)
        p.save(tmp_path / "c")
        reference = {name: value.clone() for name, value in p.state_dict().items()}
    assert all(bool(value.isfinite().all()) for value in reference.values())
    with make(after, skip_nonfinite=True) as p:
        p.load(tmp_path / "c")
        assert all(torch.equal(reference[name], value) for name, value in p.state_dict().items())
        for i in range(after.pipelines):
            assert all(bool(value.isfinite().all()) for value in p.state_dict(i).values())
        assert all(loss == loss for loss in losses(p, 6))
        assert p.skipped_updates == 0
        assert all(bool(value.isfinite().all()) for value in p.state_dict(0).values())
    assert ("have infinities or NaN: they begin at the reference" in caplog.text) == (after == PLAN)
