"""Plugin of pytest: a kernel test that is skipped in CI fails the run."""

import os

import pytest


def pytest_sessionfinish(session: pytest.Session) -> None:
    """In CI a skipped kernel test is a failure: a green run means that the kernel was tested."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or not os.environ.get("CI"):
        return
    skipped = [r.nodeid for r in reporter.stats.get("skipped", []) if "kernel" in r.keywords]
    if skipped:
        reporter.write_line(f"kernel tests were skipped in CI: {', '.join(skipped)}", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
