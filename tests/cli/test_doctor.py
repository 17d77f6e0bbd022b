"""What the machine has, and what is missing."""

import os
import sys
from types import SimpleNamespace

import pytest
import torch

import avgpipe_ext
from avgpipe import __version__
from avgpipe.cli.doctor import try_shared_memory
from avgpipe_ext import ring, run_time
from tests.cli.command import invoke, strict


def test_json_has_versions_build_machine_and_links():
    result = invoke("doctor", "--json")
    assert result.exit_code == 0
    answer = strict(result.stdout)
    assert answer["usable"] is True
    assert answer["versions"]["avgpipe"] == __version__
    assert answer["versions"]["torch"] == torch.__version__
    assert answer["native"] == avgpipe_ext.build_info()
    assert answer["operators"] == {"cpu": avgpipe_ext.cpu_path(), "cuda": avgpipe_ext.cuda_path()}
    assert answer["operators"]["cpu"] in ("baseline", "avx2", "avx512")
    assert answer["machine"]["cores"] >= 1
    assert answer["machine"]["memory_bytes"] > 2**28
    assert answer["links"]["same process"] == "local"
    assert answer["links"]["other host"] == "torch.distributed, gloo"
    if sys.platform.startswith("linux"):
        assert answer["links"]["other process of this host"] == "shared memory"
    assert len(answer["cuda"]["devices"]) == torch.cuda.device_count()


def test_missing_cuda_comes_with_a_remedy(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.version, "cuda", None)
    answer = strict(invoke("doctor", "--json").stdout)
    assert any("CUDA" in item["what"] and item["do"] for item in answer["missing"])


@pytest.fixture
def device(monkeypatch, tmp_path):
    """A machine with a CUDA device, as far as the doctor looks, and no MPS. Returns the folder of MPS."""
    properties = SimpleNamespace(name="A GPU", major=9, minor=0, total_memory=2**36)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: properties)
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("capability", "images", "cupy", "kernels"),
    [
        ((7, 5), ["7.5", "8.0"], False, "compiled"),
        ((7, 0), ["7.5", "8.0"], True, "cupy"),
        ((7, 0), ["7.5", "8.0"], False, "none"),
        ((9, 0), [], False, "none"),
        ((9, 0), [], True, "cupy"),
        ((12, 1), ["8.0", "9.0+PTX"], False, "compiled"),
    ],
)
def test_the_images_of_the_kernels_are_compared_with_the_devices(
    device, monkeypatch, capability, images, cupy, kernels
):
    major, minor = capability
    properties = SimpleNamespace(name="A GPU", major=major, minor=minor, total_memory=2**36)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: properties)
    info = {**avgpipe_ext.build_info(), "cuda": bool(images), "cuda_arch_list": images}
    monkeypatch.setattr(avgpipe_ext, "build_info", lambda: info)
    monkeypatch.setattr(run_time, "build_info", lambda: info)
    monkeypatch.setattr(run_time, "has_cupy", lambda: cupy)
    answer = strict(invoke("doctor", "--json").stdout)
    assert [d["kernels"] for d in answer["cuda"]["devices"]] == [kernels]
    lacking = [item for item in answer["missing"] if item["what"].startswith("CUDA kernels for A GPU")]
    assert len(lacking) == (kernels == "none")
    for item in lacking:
        assert f"(compute capability {major}.{minor})" in item["what"]
        assert ("plain torch is used" in item["what"]) is (not images)
        assert "avgpipe[cupy]" in item["do"]
        assert f"TORCH_CUDA_ARCH_LIST={major}.{minor}" in item["do"]


@pytest.mark.parametrize(
    ("architectures", "lacks"),
    [
        (["sm_75", "sm_90", "compute_120"], False),
        (["sm_80", "sm_86"], True),
        (["sm_80", "compute_80"], False),
        (["sm_90a"], False),
        ([], False),  # torch does not say
    ],
)
def test_the_architectures_of_torch_are_compared_with_the_devices(device, monkeypatch, architectures, lacks):
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: architectures)
    answer = strict(invoke("doctor", "--json").stdout)
    assert answer["cuda"]["torch_architectures"] == architectures
    found = [item["what"] for item in answer["missing"] if item["what"].startswith("torch's own kernels")]
    assert len(found) == lacks


def test_a_device_s_queues_and_the_processes_that_share_it_are_reported(device, monkeypatch):
    shown = strict(invoke("doctor", "--json").stdout)["cuda"]
    assert shown["queues"].startswith("32 for all streams in processes that avgpipe starts, 8 in others")
    assert shown["shared_by_processes"].startswith("one after another: no MPS")

    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    (device / "nvidia-cuda-mps-control.pid").write_text(f"{os.getpid()}\n")
    shown = strict(invoke("doctor", "--json").stdout)["cuda"]
    assert shown["queues"] == "32 for all streams (CUDA_DEVICE_MAX_CONNECTIONS)"
    assert shown["shared_by_processes"].startswith(
        "kernels run at once (MPS is running); no guarantee about lost"
    )


@pytest.mark.parametrize("is_there", [True, False])
def test_what_shares_memory_of_devices_may_be_missing(device, monkeypatch, is_there):
    monkeypatch.setattr("avgpipe.cli.doctor._has_binding", lambda: is_there)
    shown = strict(invoke("doctor", "--json").stdout)
    assert ("CUDA IPC" in shown["links"]["other process, same CUDA device"]) is is_there
    assert ("peer access" in shown["links"]["a CUDA device for each process"]) is is_there
    assert any("cuda.bindings" in item["what"] for item in shown["missing"]) is not is_there


def test_an_mps_that_has_ended_is_not_there(device):
    (device / "nvidia-cuda-mps-control.pid").write_text("999999999")
    assert "no MPS" in strict(invoke("doctor", "--json").stdout)["cuda"]["shared_by_processes"]


def test_a_person_reads_lines():
    result = invoke("doctor")
    assert result.exit_code == 0
    assert torch.__version__ in result.stdout
    assert "ready to train" in result.stdout


def test_without_the_native_operators_it_says_how_to_build_them(monkeypatch):
    monkeypatch.setitem(sys.modules, "avgpipe_ext", None)
    result = invoke("doctor", "--json")
    assert result.exit_code == 1
    answer = strict(result.stdout)
    assert answer["usable"] is False
    assert any("native operators" in item["what"] for item in answer["missing"])


def test_missing_shared_memory_comes_with_a_reason_and_a_remedy(monkeypatch):
    monkeypatch.setattr("avgpipe.cli.doctor.try_shared_memory", lambda: "no such file")
    answer = strict(invoke("doctor", "--json").stdout)
    assert answer["links"]["other process of this host"] == "torch.distributed, gloo"
    assert answer["usable"] is True
    lacking = next(item for item in answer["missing"] if "shared memory" in item["what"])
    assert "no such file" in lacking["what"]
    assert "/proc" in lacking["do"]


# ---- the try of shared memory ----------------------------------------------------------------------------------------


def test_it_works_where_the_ring_does():
    assert try_shared_memory() is None


def test_a_system_without_rings_is_reported(monkeypatch):
    monkeypatch.setattr(ring, "supported", lambda: False)
    assert "needs Linux" in try_shared_memory()


def test_no_memory_is_reported(monkeypatch):
    def fails(size):
        raise MemoryError(f"no {size} bytes of shared memory")

    monkeypatch.setattr(ring.Memory, "create", fails)
    assert try_shared_memory() == "no 4096 bytes of shared memory"


def test_a_process_that_may_not_open_it_is_reported(monkeypatch):
    monkeypatch.setattr("avgpipe.cli.doctor._PEER", "raise PermissionError('hidden')")
    assert try_shared_memory() == "another process cannot open it: PermissionError: hidden"
