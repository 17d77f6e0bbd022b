import pytest

pytest.importorskip("transformers", reason="the trainer is transformers'")
pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")
