"""podgate's image, as an OCI archive, from the files that deploy/Dockerfile copies."""

import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

from tests.polling import PATIENCE

ROOT = pathlib.Path(__file__).parents[2]
DOCKERFILE = ROOT / "deploy" / "Dockerfile"
SOURCE = "https://example.org/podgate"
REVISION = "0123456789abcdef0123456789abcdef01234567"


def build(path: pathlib.Path, name: str) -> None:
    """Write the archive that deploy/rootfs.py makes. It takes most of a minute.

    name: of the image in it.
    """
    unfinished = path.with_name(f"unfinished-{path.name}")
    with tempfile.TemporaryDirectory() as made:
        copy_sources(pathlib.Path(made))
        build = command(sys.executable, made, name, str(unfinished))
        subprocess.run(build, check=True, timeout=300 * PATIENCE)
    unfinished.rename(path)


def command(python: str, sources: str, name: str, output: str) -> list[str]:
    """Of deploy/rootfs.py, without capabilities, as in a build of an image."""
    without = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"]
    labels = [f"--source={SOURCE}", f"--revision={REVISION}"]
    return [*without, python, f"{sources}/deploy/rootfs.py", "--name", name, *labels, output]


def copy_sources(directory: pathlib.Path) -> None:
    """What the Dockerfile's first stage has of the checkout."""
    for origin in copied_files():
        place = directory / origin
        place.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / origin).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / origin, place, ignore=ignored)
        else:
            shutil.copy(ROOT / origin, place)


def copied_files() -> list[str]:
    """Files and directories of the checkout that the Dockerfile's first stage has."""
    text = DOCKERFILE.read_text(encoding="utf-8").replace("\\\n", " ")
    lines = re.findall(r"^COPY (?!--)(.*)$", text, re.MULTILINE)
    return [origin.rstrip("/") for line in lines for origin in line.split()[:-1]]
