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
    # Without capabilities, as in a build of an image.
    without = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"]
    with tempfile.TemporaryDirectory() as made:
        copied = pathlib.Path(made)
        for origin in copied_files():
            place = copied / origin
            place.parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / origin).is_dir():
                ignored = shutil.ignore_patterns("__pycache__")
                shutil.copytree(ROOT / origin, place, ignore=ignored)
            else:
                shutil.copy(ROOT / origin, place)
        build = [sys.executable, str(copied / "deploy" / "rootfs.py"), "--name", name]
        labels = [f"--source={SOURCE}", f"--revision={REVISION}"]
        subprocess.run(
            [*without, *build, *labels, str(unfinished)], check=True, timeout=300 * PATIENCE
        )
    unfinished.rename(path)


def copied_files() -> list[str]:
    """Files and directories of the checkout that the Dockerfile's first stage has."""
    text = DOCKERFILE.read_text(encoding="utf-8").replace("\\\n", " ")
    lines = re.findall(r"^COPY (?!--)(.*)$", text, re.MULTILINE)
    return [origin.rstrip("/") for line in lines for origin in line.split()[:-1]]
