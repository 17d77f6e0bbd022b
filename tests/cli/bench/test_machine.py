"""What a measurement says of its machine."""

import json

import torch

import avgpipe_ext
from avgpipe.cli.bench.machine import machine, memory_available_bytes, versions


def test_machine_has_processor_cores_threads_and_memory():
    found = machine(2, "cpu")
    assert found["cpu"]
    assert found["cores"] >= 1
    assert found["threads"] == 2
    assert found["load_average"] is None or found["load_average"] >= 0


def test_available_memory_is_bytes_or_unknown():
    available = memory_available_bytes("cpu")
    assert available is None or 2**20 < available < 2**50


def test_versions_are_json_and_have_torch_and_the_native_build():
    found = json.loads(json.dumps(versions()))
    assert found["torch"] == torch.__version__
    assert found["native"]["version"] == avgpipe_ext.build_info()["version"]
