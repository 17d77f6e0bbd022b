"""Whether this CPU has LSTMs in bfloat16: oneDNN makes them from AVX-512 on only."""

from __future__ import annotations

import pytest
import torch


def _has() -> bool:
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            torch.nn.LSTM(4, 4)(torch.zeros(1, 1, 4))
    except RuntimeError:
        return False
    return True


needs_bfloat16_lstm = pytest.mark.skipif(not _has(), reason="no LSTM in bfloat16 on this CPU")
