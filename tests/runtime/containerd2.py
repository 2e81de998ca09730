"""containerd 2.x, which has NRI, like the containerd of `tests.runtime.containerd`.

Debian 12 and 13 have older ones: its programs `containerd`, `containerd-shim-runc-v2` and `ctr` are
in a directory that the user names.
"""

import contextlib
import os
import pathlib
import subprocess
from collections.abc import Iterator
from typing import Any

from tests import polling
from tests.runtime import containerd
from tests.runtime.containerd import Containerd


class Containerd2(Containerd):
    """One runtime. `start` it; `end` takes it and its containers away."""

    def __init__(self, network: dict[str, Any], binaries: pathlib.Path) -> None:
        """binaries: the directory with its programs."""
        self._binaries = binaries
        self.has_nri = True
        """Whether it has NRI, at its next start."""
        super().__init__(network)

    def start(self) -> None:
        (self.directory / "config.toml").write_text(self._config())
        super().start()

    def import_archive(self, archive: pathlib.Path) -> None:
        """Bring in the images of an OCI archive."""
        subprocess.run(
            [
                *(str(self._binaries / "ctr"), "--address", str(self.socket)),
                *("--namespace", "k8s.io", "images", "import", "--local", str(archive)),
            ],
            check=True,
            capture_output=True,
            timeout=polling.PATIENCE_SECONDS,
        )

    def _command(self) -> list[str]:
        # It finds its shim in PATH.
        path = f"{self._binaries}:{os.environ['PATH']}"
        program = str(self._binaries / "containerd")
        return ["env", f"PATH={path}", program, "--config", str(self.directory / "config.toml")]

    def _config(self) -> str:
        return f"""{super()._config()}
[plugins."io.containerd.nri.v1.nri"]
disable = {str(not self.has_nri).lower()}
socket_path = "/run/nri/nri.sock"
plugin_path = "{self.directory}/nri-plugins"
plugin_config_path = "{self.directory}/nri-config"

[plugins."io.containerd.nri.v1.nri".default_validator]
# For pods that require a plugin by an annotation.
enable = true
"""


@contextlib.contextmanager
def running(network: dict[str, Any], binaries: pathlib.Path) -> Iterator[Containerd2]:
    """A runtime with images, in the lab that this process is in; gone afterwards."""
    with containerd.covered():
        made = Containerd2(network, binaries)
        try:
            made.start()
            made.import_images()
            yield made
        finally:
            made.end()
