"""`python deploy/krew.py FILE URL`: what krew needs to install `kubectl podgate`.

FILE is the packed plugin (deploy/plugin.py). Beside it come an archive of it with the license,
always of the same bytes, and podgate.krew.yaml, krew's manifest, by which
`kubectl krew install --manifest-url=...` downloads the archive from URL, a directory of the release
(krew.sigs.k8s.io/docs/developer-guide/plugin-manifest).
"""

import gzip
import hashlib
import io
import json
import pathlib
import re
import sys
import tarfile

SOURCE = pathlib.Path(__file__).resolve().parents[1]
ARCHIVE = "kubectl-podgate.tar.gz"
MANIFEST = "podgate.krew.yaml"
_VERSION = re.compile(r'^VERSION = "([^"]+)"', re.MULTILINE)


def write(plugin: pathlib.Path, url: str) -> None:
    """Write both files into the plugin's directory."""
    archive = pack({plugin.name: plugin.read_bytes(), "LICENSE": (SOURCE / "LICENSE").read_bytes()})
    (plugin.parent / ARCHIVE).write_bytes(archive)
    made = manifest(plugin.name, f"{url.rstrip('/')}/{ARCHIVE}", archive)
    # JSON is YAML.
    (plugin.parent / MANIFEST).write_text(json.dumps(made, indent=2) + "\n", encoding="utf-8")


def pack(files: dict[str, bytes]) -> bytes:
    """A tar archive, compressed; the first file is executable."""
    packed = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=packed, mode="wb", filename="", mtime=0) as compressed,
        tarfile.open(fileobj=compressed, mode="w") as archive,
    ):
        for number, (name, content) in enumerate(files.items()):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            member.mode = 0o644 if number else 0o755
            archive.addfile(member, io.BytesIO(content))
    return packed.getvalue()


def manifest(name: str, uri: str, archive: bytes) -> dict[str, object]:
    systems = {"key": "os", "operator": "In", "values": ["darwin", "linux"]}
    platform = {
        "selector": {"matchExpressions": [systems]},
        "uri": uri,
        "sha256": hashlib.sha256(archive).hexdigest(),
        "bin": name,
        "files": [{"from": one, "to": "."} for one in (name, "LICENSE")],
    }
    return {
        "apiVersion": "krew.googlecontainertools.github.com/v1alpha2",
        "kind": "Plugin",
        "metadata": {"name": "podgate"},
        "spec": {
            "version": f"v{version()}",
            "homepage": "https://" + "/".join(uri.split("/")[2:5]),
            "shortDescription": "Isolate pods from their nodes",
            "description": "Shows which host processes reach pods, why a pod is not Ready, and "
            "operates podgate in the whole cluster.",
            "caveats": "It needs Python 3.11 or newer as python3 in PATH, and podgate in the "
            "cluster.",
            "platforms": [platform],
        },
    }


def version() -> str:
    found = _VERSION.search((SOURCE / "agent" / "__init__.py").read_text("utf-8"))
    assert found is not None
    return found[1]


if __name__ == "__main__":
    write(pathlib.Path(sys.argv[1]), sys.argv[2])
