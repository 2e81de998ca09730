"""podgate's image, as an OCI archive."""

import pathlib
import subprocess
import sys

_ROOT = pathlib.Path(__file__).parents[2]


def build(path: pathlib.Path, name: str) -> None:
    """Write the archive that deploy/rootfs.py makes. It takes most of a minute.

    name: of the image in it.
    """
    unfinished = path.with_name(f"unfinished-{path.name}")
    # Without capabilities, as in a build of an image.
    without = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"]
    build = [sys.executable, str(_ROOT / "deploy" / "rootfs.py"), "--name", name]
    subprocess.run([*without, *build, str(unfinished)], check=True, timeout=300)
    unfinished.rename(path)
