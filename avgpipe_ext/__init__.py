"""The compiled operators `torch.ops.avgpipe.*`: typed wrappers, and facts about the build.

Every operator takes a tensor, or lists of tensors of one length. Common to all:

- dtypes: float64; float32; bfloat16 and float16, computed in float32. With a 16-bit x (or out), each of the other
  tensors may be float32 (a master copy). The factors alpha and scale are rounded to the arithmetic's type.
- All tensors of a tuple have one shape and one dense order of strides (contiguous, or all channels_last); all
  tensors of a call are on one device; no written tensor shares memory with another one.
- Devices other than CPU and CUDA, and CUDA devices without compiled kernels, use plain torch
  (`avgpipe_ext.plain`), which checks shapes and devices only.
- Anything else raises ValueError with the clashing values, or TypeError, before anything is written; so does a tensor
  whose memory is not its value (`torch.Tensor.is_neg`, `is_conj`), even if it is only read.
- With check_finite=True the result is the number of elements for which a value written, as rounded to its
  dtype, is not finite: an int64 tensor of shape () on the tensors' device. An element counts once, even if
  several of its values are not finite; with several replicas, once for each replica. An optimizer's state is
  not checked. Otherwise the result is an empty int64 tensor of shape (0,).
- CUDA operators run on the current stream of the tensors' device and never wait for it.
- Operators are updates in place: wrappers run them without recording gradients, and torch's version counters
  move, so that a backward pass that still needs an overwritten value fails instead of being wrong.
- Rounding is the same on every processor, CPU or CUDA, and for every number of threads (except for Adam's step counted
  on the device, whose bias correction uses the device's own power function).
"""

from __future__ import annotations

from avgpipe_ext._library import build_info, cpu_path
from avgpipe_ext.operators import (
    correct_update_,
    easgd_step_,
    elastic_adamw_,
    elastic_pull_,
    elastic_round_,
    elastic_sgd_,
    elastic_step_,
    pack,
    predict_adam_,
    predict_sgd_,
    reference_apply_,
    register_plain,
    trial_adam_,
    trial_sgd_,
    unpack_,
)
from avgpipe_ext.run_time import cuda_path, install_if_needed

__all__ = [
    "build_info",
    "correct_update_",
    "cpu_path",
    "cuda_path",
    "easgd_step_",
    "elastic_adamw_",
    "elastic_pull_",
    "elastic_round_",
    "elastic_sgd_",
    "elastic_step_",
    "pack",
    "predict_adam_",
    "predict_sgd_",
    "reference_apply_",
    "trial_adam_",
    "trial_sgd_",
    "unpack_",
]

if not install_if_needed():
    register_plain("CUDA")
