"""How this machine reaches its registries: settings of apt and pip, proxies, local paths."""

import ast
import dataclasses
import os
import re
import subprocess
import sys
from collections.abc import Iterable

COPIES = "/opt/machine"
"""Where no package has a file: ca-certificates would replace this machine's own certificates."""

_PROXY = re.compile(r"(?i)(https?|ftp|all|no)_proxy$")
# Of what apt-config prints: how to reach a registry, not what to read there.
_APT_SETTING = re.compile(r"Acquire::(?!IndexTargets|Changelogs|CompressionTypes|cdrom)")
_PIP_SETTING = re.compile(r"(?:global|install|download)\.([\w-]+)=(.+)$", re.MULTILINE)
_ABSOLUTE_PATH = re.compile(r"(?:^|(?<=[\s=,])|(?<=file://))/[^\s,]+", re.MULTILINE)


@dataclasses.dataclass(frozen=True, slots=True)
class Setup:
    """What of this machine another root file system needs to reach the same registries."""

    environment: dict[str, str]
    files: tuple[str, ...]
    """To be copied to the same path below `COPIES`, which `environment` names for them."""
    directories: tuple[str, ...]
    """To be mounted at the same path."""

    @classmethod
    def read(cls) -> "Setup":
        """This machine's own."""
        done = subprocess.run(
            [sys.executable, "-m", "pip", "config", "list"],
            check=False,
            capture_output=True,
            text=True,
        )
        environment = pip_variables(done.stdout) | {
            name: value
            for name, value in os.environ.items()
            if name.startswith("PIP_") or _PROXY.match(name)
        }
        named = local_paths(environment.values())
        files = tuple(path for path in named if os.path.isfile(path))
        for name, value in environment.items():
            if value in files:
                environment[name] = f"{COPIES}{value}"
        directories = {_volume(path) for path in named if os.path.isdir(path)}
        return cls(environment, files, tuple(sorted(directories)))


def pip_variables(settings: str) -> dict[str, str]:
    """Environment variables for pip that mean the same as what `pip config list` printed."""
    return {
        f"PIP_{name.replace('-', '_').upper()}": " ".join(str(ast.literal_eval(value)).split())
        for name, value in _PIP_SETTING.findall(settings)
    }


def local_paths(texts: Iterable[str]) -> list[str]:
    """Absolute paths in settings, as they are or as file:// addresses."""
    return sorted({path for text in texts for path in _ABSOLUTE_PATH.findall(text)})


def _volume(path: str) -> str:
    """The first two parts of a path: an index's pages link to files beside its own directory."""
    return "/".join(path.split("/")[:3])


def apt_settings() -> str:
    """This machine's settings of apt's downloads, such as proxies, as a configuration file."""
    dumped = subprocess.run(
        ["apt-config", "dump"], check=True, capture_output=True, text=True
    ).stdout
    return "".join(f"{line}\n" for line in dumped.splitlines() if _APT_SETTING.match(line))
