"""Copies of small trees, for tests of this package."""

import pathlib
import shutil
import subprocess
from collections.abc import Mapping

from tests.mutants import trials

_PLUGINS = ("live_code", "namespaces", "protocol", "recording", "trial_child", "trial_server")


def copy(root: pathlib.Path, files: Mapping[str, str], directory: pathlib.Path) -> trials.Copy:
    """Of a tree with the plugins and these files: content by path."""
    packages = ("agent", "tests", "tests/mutants")
    content = {**{f"{package}/__init__.py": "" for package in packages}, **files}
    for name, text in content.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    for name in _PLUGINS:
        shutil.copy(pathlib.Path(trials.__file__).with_name(f"{name}.py"), root / "tests/mutants")
    subprocess.run(["git", "init", "--quiet", root], check=True)
    return trials.Copy(root, directory)
