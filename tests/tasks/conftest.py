from tests.lab.workloads.conftest import _one_thread as _one_thread
