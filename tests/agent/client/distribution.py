"""podgate-client as a user has it: its wheel in an environment with its dependencies only."""

import importlib.metadata
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[3]
_SECONDS = 120

# What pip installs with it; grpcio needs typing-extensions.
_PACKAGES = {
    "grpcio": ("grpc",),
    "protobuf": ("google/protobuf", "google/_upb"),
    "typing_extensions": ("typing_extensions.py",),
}


def build(directory: pathlib.Path) -> pathlib.Path:
    """The wheel, as `make client` builds it."""
    options = ("-t", "wheel", "-d", str(directory))
    _run("-m", "hatchling", "build", *options, cwd=ROOT / "deploy" / "client")
    (wheel,) = directory.glob("podgate_client-*.whl")
    return wheel


def install(wheel: pathlib.Path, directory: pathlib.Path) -> pathlib.Path:
    """A new environment with the wheel; returns its Python. Its dependencies are links to this
    environment's, so that no registry is needed."""
    _run("-m", "venv", "--without-pip", str(directory))
    python = directory / "bin" / "python"
    (site,) = directory.glob("lib/python*/site-packages")
    (site / "google").mkdir()
    for name, paths in _PACKAGES.items():
        found = importlib.metadata.distribution(name)
        for path in paths:
            (site / path).symlink_to(str(found.locate_file(path)))
        information = pathlib.Path(str(found.locate_file(""))).glob(f"{name}-*.dist-info")
        for each in information:
            (site / each.name).symlink_to(each)
    pip = ("-m", "pip", "--disable-pip-version-check", "--python", str(python))
    _run(*pip, "install", "-q", "--no-index", "--root-user-action", "ignore", str(wheel))
    return python


def _run(*arguments: str, cwd: pathlib.Path = ROOT) -> None:
    done = subprocess.run(
        [sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, timeout=_SECONDS
    )
    assert done.returncode == 0, done.stderr
