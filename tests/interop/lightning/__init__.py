import pytest

pytest.importorskip("lightning", reason="the trainer is Lightning's")
