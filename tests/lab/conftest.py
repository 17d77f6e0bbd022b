from tests.cli.conftest import text as text
