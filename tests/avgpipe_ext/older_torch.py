"""Does the library that was built for one torch load under another, with all of its operators?"""

from __future__ import annotations

import torch

import avgpipe_ext


def main() -> None:
    built = avgpipe_ext.build_info()
    print(
        f"torch {torch.__version__}: the library built for torch {built['torch']} loads, CUDA built: {built['cuda']}"
    )
    names = sorted(set(avgpipe_ext.__all__) - {"build_info", "cpu_path", "cuda_path"})
    registered = [torch._C._dispatch_has_kernel_for_dispatch_key(f"avgpipe::{n}", "CUDA") for n in names]
    assert all(registered), dict(zip(names, registered))  # compiled, or in plain torch


if __name__ == "__main__":
    main()
