from tests.lab.workloads.conftest import _one_thread as _one_thread
from tests.lab.workloads.conftest import text_folder as text_folder
