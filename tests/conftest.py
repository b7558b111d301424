"""What the shell around the tests may have set, and no test may depend on; and what worker processes share."""

import os
import shutil
import tempfile

for name in ("COLUMNS", "LINES", "PYTHONDONTWRITEBYTECODE"):  # the last: every vLLM would be compiled in every process
    os.environ.pop(name, None)


def pytest_configure(config):
    if not hasattr(config, "workerinput"):
        os.environ["TESTS_ANSWERS"] = tempfile.mkdtemp()  # of shared.py


def pytest_unconfigure(config):
    if not hasattr(config, "workerinput"):
        shutil.rmtree(os.environ["TESTS_ANSWERS"], ignore_errors=True)
