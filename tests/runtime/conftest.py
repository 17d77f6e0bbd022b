"""What is compiled once, before the tests that need it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="session")
def default_backend() -> Iterator[None]:
    """torch.compile's own backend: what it compiles for every process is compiled, outside the time limit of a test.

    A test with it has the marks ``timeout(..., func_only=True)`` and ``ranks``: it asks other processes for compilers
    and what the processor can.
    """
    from torch._inductor import config, cpp_builder, exc

    try:
        cpp_builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler as error:
        pytest.skip(f"the default backend needs a C++ compiler: {error}")
    with config.patch(compile_threads=1):
        torch.compile(torch.sin)(torch.ones(8))
        yield
