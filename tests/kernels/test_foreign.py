"""A guest of another architecture gets what podgate and its tests import, and no tools."""

import pathlib
import re

from tests.kernels import foreign, report
from tests.kernels.architectures import ARCHITECTURES
from tests.kernels.guests import Files

CHECKOUT = pathlib.Path(__file__).parents[2]


def test_requirements_have_no_tools() -> None:
    found = {re.split(r"[<>=]", one)[0] for one in foreign.requirements(CHECKOUT)}
    assert {"grpcio", "msgspec", "pytest", "hypothesis"} <= found
    assert not {"mypy", "ruff", "podgate"} & found


def test_paths_of_the_guest_begin_at_its_root() -> None:
    root = pathlib.Path("/cache/arm64")
    files = Files(ARCHITECTURES["arm64"], root, (), b"")
    assert files.inside(root / "usr" / "lib") == "/usr/lib"


def test_runs_of_another_architecture_are_apart() -> None:
    assert report.title("6.12", "amd64") == "6.12"
    assert report.title("6.12", "arm64") == "6.12 arm64"
    assert report.title("6.12", "arm64", has_systemd=True) == "6.12 arm64 with systemd"
