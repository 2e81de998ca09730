"""Units of tests in real runs with workers."""

import os
import pathlib
import re
import subprocess
import sys
import textwrap

import pytest

from tests.polling import PATIENCE_SECONDS

_ROOT = pathlib.Path(__file__).parents[2]
_FILES = {
    "pytest.ini": "[pytest]\naddopts = -p xdist -p tests.nodes.balance",
    "conftest.py": """
        from tests.nodes import balance

        pytest_addoption = balance.add_option
    """,
    "test_first.py": "def test_before(): pass",
    "test_second.py": """
        import os

        def test_passes(): pass
        def test_crashes(): os._exit(1)
        def test_follows(): pass
    """,
    "test_third.py": "def test_after(): pass",
}


# As execnet fails when the worker has ended, and the thread that reads from it has not seen that.
_BROKEN_PIPE = """
    from tests.nodes import balance

    pytest_addoption = balance.add_option

    def fail(item):
        raise OSError("cannot send (already closed?)")

    class Ending:
        def __init__(self, config):
            self._config = config

        def pytest_runtest_logreport(self, report):
            if report.nodeid.endswith("test_passes"):
                (node,) = self._config.pluginmanager.getplugin("dsession")._active_nodes
                node.channel.send = fail

    def pytest_configure(config):
        if not hasattr(config, "workerinput"):
            config.pluginmanager.register(Ending(config))
"""


@pytest.mark.parametrize(
    "files", [_FILES, _FILES | {"conftest.py": _BROKEN_PIPE}], ids=["known", "unknown"]
)
def test_worker_that_crashes_is_replaced_and_every_test_runs_once(
    files: dict[str, str], tmp_path: pathlib.Path
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(textwrap.dedent(text))
    environment = {name: value for name, value in os.environ.items() if "PYTEST" not in name}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-v", "-n", "1"],
        cwd=tmp_path,
        env=environment | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(_ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    reported = re.findall(r"\] (PASSED|FAILED) \S+::(\w+)", done.stdout)
    # The last two in any order: the third file may have been given to the worker before it crashed.
    assert reported[:3] == [
        ("PASSED", "test_before"),
        ("PASSED", "test_passes"),
        ("FAILED", "test_crashes"),
    ], done.stdout + done.stderr
    assert sorted(reported[3:]) == [("PASSED", "test_after"), ("PASSED", "test_follows")]
