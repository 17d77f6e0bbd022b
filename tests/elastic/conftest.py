from __future__ import annotations

import pytest

import avgpipe_ext

OPERATORS = [
    "elastic_sgd_",
    "elastic_adamw_",
    "elastic_step_",
    "easgd_step_",
    "elastic_pull_",
    "reference_apply_",
    "elastic_round_",
]


@pytest.fixture
def calls(monkeypatch):
    """Names of the operators called."""
    names = []

    def counted(name, own):
        def call(*args, **options):
            names.append(name)
            return own(*args, **options)

        return call

    for name in OPERATORS:
        monkeypatch.setattr(avgpipe_ext, name, counted(name, getattr(avgpipe_ext, name)))
    return names
