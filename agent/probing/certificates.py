"""Client certificates that pods' probes name: read when a pod needs them, and as they change.

Level-triggered: after any hint, and once a minute, each certificate is read whole. One that cannot
be read any more is withdrawn, so that its probes have no result; one whose API server is away
stays.
"""

import asyncio
import contextlib
import dataclasses
import pathlib
import time
from collections.abc import Iterable, Iterator
from functools import partial

import structlog

from agent import tasks
from agent.kube.client import ApiClient
from agent.linux import directory_changes
from agent.logs import Event
from agent.pods.changes import Changes
from agent.probing import certificate_files, certificate_secrets
from agent.probing.certificate_secrets import NotReachedError
from probes.protocols.client_certificates import CertificateError, Certificates, ClientCertificate
from probes.spec.definitions import CertificateName

log = structlog.get_logger(__name__)

# As often as a kubelet reads mounted Secrets again (syncFrequency), and client-go its credentials.
_REFRESH_SECONDS = 60.0


@dataclasses.dataclass(frozen=True, slots=True)
class _Key:
    namespace: str
    secret: str
    file: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.secret or self.file}"


@dataclasses.dataclass(slots=True)
class _Entry:
    """One certificate. users: the uids of pods that need it; read_at: on the loop's clock."""

    found: ClientCertificate | str
    users: set[str] = dataclasses.field(default_factory=set)
    read_at: float | None = None


class ProbeCertificates:
    """Those of all pods. Create it on the running loop."""

    def __init__(self, directory: pathlib.Path | None, api: ApiClient | None) -> None:
        """directory: with those of the node, by namespace and name; api: for Secrets."""
        self._directory = directory
        self._api = api
        self._entries: dict[_Key, _Entry] = {}
        self._hint = asyncio.Event()
        self.changes = Changes()
        """Pods of which a certificate changed."""

    def of(self, uid: str, namespace: str, names: Iterable[CertificateName]) -> Certificates:
        """What a pod's probes use, from now on until `forget`."""
        keys = {name: _Key(namespace, name.secret, name.file) for name in names}
        for key in [key for key, one in self._entries.items() if uid in one.users]:
            if key not in keys.values():
                self._release(key, uid)
        for key in keys.values():
            entry = self._entries.get(key)
            if entry is None:
                text = f"the client certificate {key} has not been read yet"
                entry = self._entries[key] = _Entry(text)
                self._hint.set()
            entry.users.add(uid)
        return {name: self._entries[key].found for name, key in keys.items()}

    def forget(self, uid: str) -> None:
        """The pod has no probes any more."""
        for key in [key for key, one in self._entries.items() if uid in one.users]:
            self._release(key, uid)

    def problems(self, uid: str, now: float | None = None) -> Iterator[str]:
        """One sentence for each certificate of a pod that is unusable or ends soon. now: Unix
        time in seconds."""
        now = time.time() if now is None else now
        for key, entry in self._entries.items():
            if uid not in entry.users or entry.read_at is None:
                continue
            if isinstance(entry.found, str):
                yield f"Probes have no client certificate: {entry.found}"
            elif warning := entry.found.warning(now):
                yield f"Of probes, {key}: {warning}"

    async def run(self) -> None:
        """Read until cancelled."""
        while True:
            directories = self._directories()
            async with asyncio.TaskGroup() as group:
                watch = tasks.start(group, "certificate files", partial(self._watch, directories))
                while directories == self._directories():
                    self._hint.clear()
                    await self._read_all()
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(_REFRESH_SECONDS):
                            await self._hint.wait()
                watch.cancel()

    def _release(self, key: _Key, uid: str) -> None:
        entry = self._entries[key]
        entry.users.discard(uid)
        if not entry.users:
            del self._entries[key]

    def _directories(self) -> tuple[pathlib.Path, ...]:
        root = self._directory
        names = sorted((key.namespace, key.file) for key in self._entries if key.file)
        return tuple(root / namespace / name for namespace, name in names) if root else ()

    async def _watch(self, directories: tuple[pathlib.Path, ...]) -> None:
        if not directories:
            await asyncio.Event().wait()
        async for _ in directory_changes.follow(*directories):
            self._hint.set()

    async def _read_all(self) -> None:
        for key in tuple(self._entries):
            if key in self._entries:
                await self._read(key, self._entries[key])

    async def _read(self, key: _Key, entry: _Entry) -> None:
        loop_now = asyncio.get_running_loop().time()
        is_due = entry.read_at is None or loop_now - entry.read_at >= _REFRESH_SECONDS
        if key.secret and not is_due:
            return  # A hint is about files, or about another certificate.
        entry.read_at = loop_now
        before = entry.found
        previous = before if isinstance(before, ClientCertificate) else None
        try:
            entry.found = await self._read_one(key, previous)
        except NotReachedError as error:
            entry.found = previous or str(error)
        except CertificateError as error:
            entry.found = str(error)
        if entry.found == before:
            return
        if isinstance(entry.found, str):
            log.warning(Event.PROBE_CERTIFICATE_UNUSABLE, certificate=str(key), error=entry.found)
        else:
            log.info(Event.PROBE_CERTIFICATE_READ, certificate=str(key))
        for uid in tuple(entry.users):
            self.changes.mark(uid)

    async def _read_one(self, key: _Key, previous: ClientCertificate | None) -> ClientCertificate:
        """Raises `CertificateError`."""
        if key.secret:
            name = key.namespace, key.secret
            parts = await certificate_secrets.content(self._api, *name)
            return await asyncio.to_thread(certificate_secrets.made, *name, parts, previous)
        if self._directory is None:
            raise CertificateError(
                f"the client certificate {key} is a file: name --probe-certificates-dir"
            )
        return await asyncio.to_thread(
            certificate_files.read, self._directory, key.namespace, key.file, previous
        )
