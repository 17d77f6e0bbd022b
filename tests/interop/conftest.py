from tests.workloads.conftest import _one_thread  # noqa: F401 (a fixture of all tests here)
