"""Container images made from what lies on this machine: no registry is used."""

import hashlib
import io
import json
import pathlib
import shutil
import tarfile

PAUSE = "localhost/pause:1"
POD = "localhost/pod:1"
"""Busybox, whose httpd, sh and others are in /bin; /www/healthz answers "ok"."""

_APPLETS = ("cat", "httpd", "mkdir", "nc", "rmdir", "sh", "sleep", "wget")
_LAYER = "application/vnd.oci.image.layer.v1.tar"
_CONFIG = "application/vnd.oci.image.config.v1+json"
_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


def write(path: pathlib.Path, machine: str) -> None:
    """Write both images as one OCI archive, for `ctr images import`. machine: as in uname."""
    layer = _layer()
    config = _json(
        {
            "architecture": _ARCHITECTURES.get(machine, machine),
            "os": "linux",
            "config": {"Entrypoint": ["/bin/sleep", "2147483647"], "WorkingDir": "/"},
            "rootfs": {"type": "layers", "diff_ids": [_digest(layer)]},
        }
    )
    manifest = _json(
        {
            "schemaVersion": 2,
            "mediaType": _MANIFEST,
            "config": _descriptor(_CONFIG, config),
            "layers": [_descriptor(_LAYER, layer)],
        }
    )
    index = _json(
        {
            "schemaVersion": 2,
            "manifests": [
                _descriptor(_MANIFEST, manifest)
                | {"annotations": {"io.containerd.image.name": name}}
                for name in (PAUSE, POD)
            ],
        }
    )
    with tarfile.open(path, "w") as archive:
        _add(archive, "oci-layout", b'{"imageLayoutVersion": "1.0.0"}')
        _add(archive, "index.json", index)
        for blob in (layer, config, manifest):
            _add(archive, f"blobs/sha256/{_digest(blob).removeprefix('sha256:')}", blob)


def _layer() -> bytes:
    busybox = shutil.which("busybox")
    assert busybox is not None, "busybox is missing; install the package busybox-static"
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        _add(archive, "bin/busybox", pathlib.Path(busybox).read_bytes(), mode=0o755)
        for applet in _APPLETS:
            link = tarfile.TarInfo(f"bin/{applet}")
            link.type = tarfile.SYMTYPE
            link.linkname = "busybox"
            archive.addfile(link)
        _add(archive, "www/healthz", b"ok\n")
    return content.getvalue()


def _add(archive: tarfile.TarFile, name: str, content: bytes, mode: int = 0o644) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    entry.mode = mode
    archive.addfile(entry, io.BytesIO(content))


def _json(value: object) -> bytes:
    return json.dumps(value).encode()


def _digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def _descriptor(kind: str, content: bytes) -> dict[str, object]:
    return {"mediaType": kind, "digest": _digest(content), "size": len(content)}
