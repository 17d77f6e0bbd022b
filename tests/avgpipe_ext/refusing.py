"""What every refusal must be."""

from __future__ import annotations

import pytest
import torch


def flat(arguments):
    return [t for a in arguments for t in (a if isinstance(a, list) else [a]) if isinstance(t, torch.Tensor)]


def raises(function, name, match, *arguments, **options):
    """One line that begins with the operator's name; every tensor is left as it was."""
    tensors = flat(arguments)
    before = [t.clone() for t in tensors]
    versions = [t._version for t in tensors]
    with pytest.raises(ValueError, match=match) as raised:
        function(*arguments, **options)
    assert "\n" not in str(raised.value)
    assert str(raised.value).startswith(f"avgpipe::{name}: ")
    assert all(torch.equal(a, b) for a, b in zip(tensors, before))
    assert versions == [t._version for t in tensors]
