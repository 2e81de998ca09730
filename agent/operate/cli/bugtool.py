"""The archive of `podgate bugtool`: parts that are read one by one, each within a time limit.

A part that fails or hangs is recorded in the manifest, and the others follow. No part contains
environment variables, tokens, kubeconfig files or more of a pod than podgate reports; what users
wrote into names and messages passes `redaction`.
"""

import dataclasses
import datetime
import io
import tarfile
import threading
import time
from collections.abc import Callable, Sequence

import msgspec

from agent import VERSION
from agent.operate.cli.redaction import redact

LIMIT_SECONDS = 30.0
"""Of one part. A command of bpftool or nft has less, so that it is reported with its own error."""

_MAX_BYTES = 16 << 20

LEFT_OUT = (
    "environment variables of all processes",
    "tokens, certificates and kubeconfig files",
    "pod manifests and specs, but for what podgate reports of them",
    "saved state in the run directory",
    "the kernel's command line",
    "the map reply_key and the field priority of the map kubelet_unit: random numbers by which "
    "the kernel identifies flows and the kubelet",
    "values of command-line options that this version does not know",
)

Content = bytes | str | msgspec.Struct | Sequence[msgspec.Struct] | dict[str, object]


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """file: its name in the archive; read: its content. It may block, and raise any exception."""

    file: str
    read: Callable[[], Content]


class PartStatus(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """One part. bytes: in the archive; redacted: secrets that were replaced; problem: why it is
    missing or incomplete, or empty."""

    file: str
    bytes: int
    seconds: float
    redacted: int = 0
    problem: str = ""


class Manifest(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The archive's table of contents. agent: why it does not respond, or empty."""

    version: str
    created: datetime.datetime
    agent: str
    parts: list[PartStatus]
    left_out: tuple[str, ...] = LEFT_OUT


def collect(
    parts: Sequence[Part], *, agent: str, limit_seconds: float = LIMIT_SECONDS
) -> tuple[bytes, Manifest]:
    """The archive (tar, gzip), and the manifest that it contains as `manifest.json`."""
    created = datetime.datetime.now(datetime.UTC)
    root = f"podgate-bugtool-{created:%Y%m%dT%H%M%SZ}"
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as archive:
        statuses = []
        for part in parts:
            content, status = _read(part, limit_seconds)
            statuses.append(status)
            if content:
                _add(archive, f"{root}/{part.file}", content, created)
        manifest = Manifest(version=VERSION, created=created, agent=agent, parts=statuses)
        encoded = msgspec.json.format(msgspec.json.encode(manifest))
        _add(archive, f"{root}/manifest.json", encoded, created)
    return stream.getvalue(), manifest


def _read(part: Part, limit_seconds: float) -> tuple[bytes, PartStatus]:
    results: list[bytes] = []
    problems: list[str] = []

    def run() -> None:
        try:
            results.append(_encode(part.read()))
        except Exception as error:
            problems.append(f"{type(error).__name__}: {error}")

    # A daemon: a system call that hangs does not keep the process from ending.
    thread = threading.Thread(target=run, name=part.file, daemon=True)
    started = time.monotonic()
    thread.start()
    thread.join(limit_seconds)
    seconds = round(time.monotonic() - started, 3)
    if thread.is_alive():
        problems.append(f"no result within {limit_seconds:g} s")
        results.clear()
    content, redacted = b"", 0
    if results and not problems:
        text, redacted = redact(results[0].decode(errors="replace"))
        content = text.encode()
        if len(content) > _MAX_BYTES:
            problems.append(f"cut to its last {_MAX_BYTES >> 20} MiB")
            content = content[-_MAX_BYTES:]
    problem, hidden = redact("; ".join(problems))
    status = PartStatus(
        file=part.file,
        bytes=len(content),
        seconds=seconds,
        redacted=redacted + hidden,
        problem=problem,
    )
    return content, status


def _encode(content: Content) -> bytes:
    if isinstance(content, bytes):
        return content
    if isinstance(content, str):
        return content.encode(errors="replace")
    return msgspec.json.format(msgspec.json.encode(content))


def _add(archive: tarfile.TarFile, name: str, content: bytes, created: datetime.datetime) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    entry.mode = 0o600
    entry.mtime = int(created.timestamp())
    archive.addfile(entry, io.BytesIO(content))
