"""`podgate-cni` in a node's CNI configuration: put in, taken out, put back.

Runtimes take the first file of the directory, by name, that ends in .conf, .conflist or .json. A
list gets one more plugin; a file of a single plugin becomes a list beside it, and is kept under a
name that runtimes do not read. Files are replaced by renaming, in an order in which every step
leaves a directory that works: who is killed in between has nothing to mend.
"""

import asyncio
import contextlib
import os
import pathlib
import sys
from collections.abc import Iterator

import msgspec
import structlog

from agent.cni import conflist
from agent.cni.conflist import ConflistError, Entry
from agent.errors import PodgateError
from agent.pods import documents
from agent.settings import CNI_BIN_DIRECTORY, CNI_CONF_DIRECTORY, RUN_DIRECTORY, Settings
from bpf import pins

log = structlog.get_logger(__name__)

BUILT = pathlib.Path(sys.prefix) / "bin" / conflist.TYPE
"""Where `make setup` puts the plugin: beside the `podgate` command."""

_SUFFIXES = (".conf", ".conflist", ".json")
# Sorts right behind the file that it is made from, and before everything else.
_MADE = "-podgate.conflist"
_SAVED = ".podgate-saved"
_UNFINISHED = ".podgate-new"

# Without any event: somebody may have removed the plugin's binary, or the whole directory.
_LOOK_EVERY_SECONDS = 10.0
# Some CNIs put their file back at once when somebody changes it; two that do so take turns for
# ever, so the pauses double.
_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 60.0


class CniError(PodgateError):
    """The node's CNI configuration is as it was; the message is one sentence."""


class CniInstaller(msgspec.Struct, frozen=True, kw_only=True):
    """How the plugin is to be installed on this node."""

    conf_directory: pathlib.Path = CNI_CONF_DIRECTORY
    bin_directory: pathlib.Path = CNI_BIN_DIRECTORY
    binary: pathlib.Path = BUILT
    """What is copied to `bin_directory`."""

    is_strict: bool = False
    """Pods wait for the gates rather than start without them, after a reboot above all."""

    run_directory: pathlib.Path = RUN_DIRECTORY
    bpffs: pathlib.Path = pathlib.Path(pins.DEFAULT_BPFFS)
    """These two as the runtime sees them, which is the node's own mount namespace."""

    @property
    def entry(self) -> Entry:
        """The plugin's configuration; what is usual is left out."""
        entry: dict[str, object] = {"type": conflist.TYPE}
        if self.is_strict:
            entry["strictStart"] = True
        if self.run_directory != RUN_DIRECTORY:
            entry["runDirectory"] = str(self.run_directory)
        if self.bpffs != pathlib.Path(pins.DEFAULT_BPFFS):
            entry["bpffs"] = str(self.bpffs)
        return entry

    @classmethod
    def of(cls, settings: Settings) -> "CniInstaller | None":
        """The one that the agent is to keep installed, if any."""
        if settings.cni_conf_directory is None:
            return None
        return cls(
            conf_directory=settings.cni_conf_directory,
            bin_directory=settings.cni_bin_directory,
            is_strict=settings.cni_strict_start,
            run_directory=settings.run_directory,
            bpffs=settings.bpffs,
        )

    @property
    def installed_binary(self) -> pathlib.Path:
        return self.bin_directory / conflist.TYPE

    def install(self) -> bool:
        """Have every new pod's ADD come by the plugin; whether anything had to be changed.

        Raises `CniError`.
        """
        with _as_cni_error():
            # The binary first: a list that names a plugin which is not there starts no pod.
            has_changed = self._copy_binary()
            return self._add_entry() or has_changed

    def remove(self, *, is_binary_kept: bool = False) -> bool:
        """Leave both directories as they were; whether there was anything to remove.

        keeps_binary: for runtimes that end pods by the list with which they were started (CRI-O).
        Raises `CniError`.
        """
        with _as_cni_error():
            has_changed = False
            if self.conf_directory.is_dir():
                for path in sorted(self.conf_directory.iterdir()):
                    has_changed |= self._remove_entry(path)
            if not is_binary_kept:
                for path in (self.installed_binary, _unfinished(self.installed_binary)):
                    has_changed |= _unlink(path)
            return has_changed

    def _copy_binary(self) -> bool:
        try:
            wanted = self.binary.read_bytes()
        except OSError as error:
            raise CniError(
                f"{self.binary} cannot be read ({error.strerror}); build it with 'make setup', or "
                "name another with --binary."
            ) from error
        if _has_content(self.installed_binary, wanted):
            return False
        self.bin_directory.mkdir(mode=0o755, parents=True, exist_ok=True)
        _replace(self.installed_binary, wanted, mode=0o755)
        return True

    def _add_entry(self) -> bool:
        path = self._network()
        stamp = _stamp(path)
        with _naming(path):
            text = _read(path)
            if path.suffix == ".conflist":
                wanted, target = conflist.with_entry(text, self.entry), path
            else:
                wanted = conflist.from_network(text, self.entry)
                target = path.with_name(path.name + _MADE)
        if wanted == text:
            return False
        if _stamp(path) != stamp:
            raise CniError(f"{path} is being rewritten; try again.")
        _replace(target, wanted.encode(), like=path)
        if target != path:
            # Until now the runtime has read the old file, and from now on it reads the new one.
            path.rename(_saved(path))
        return True

    def _network(self) -> pathlib.Path:
        """The file that runtimes read."""
        try:
            names = sorted(os.listdir(self.conf_directory))
        except FileNotFoundError:
            names = []
        for name in names:
            if name.endswith(_SUFFIXES):
                return self.conf_directory / name
        raise CniError(
            f"{self.conf_directory} holds no CNI configuration yet; install a CNI first, or name "
            "another directory with --cni-conf-dir."
        )

    def _remove_entry(self, path: pathlib.Path) -> bool:
        if path.name.endswith(_UNFINISHED):
            return _unlink(path)
        if path.name.endswith(_SAVED):
            return _restore(path.with_name(path.name.removesuffix(_SAVED)))
        if path.name.endswith(_MADE):
            _restore(path.with_name(path.name.removesuffix(_MADE)))
            return _unlink(path)
        if path.suffix != ".conflist":
            return False
        # What is broken is nobody's network, and none of ours.
        with contextlib.suppress(ConflistError):
            text = _read(path)
            if conflist.has_entry(text):
                _replace(path, conflist.without_entry(text).encode(), like=path)
                return True
        return False


class Turns:
    """How long to leave the file alone after a change, so that two who insist do not race."""

    def __init__(self) -> None:
        self._pause_seconds = 0.0
        self._changed_at: float | None = None

    def pause_seconds(self, now_seconds: float) -> float:
        """After a change: twice as long as after the last one, if that is not long ago."""
        last, self._changed_at = self._changed_at, now_seconds
        if last is None or now_seconds - last > 2 * _LONGEST_PAUSE_SECONDS:
            self._pause_seconds = _FIRST_PAUSE_SECONDS
        else:
            self._pause_seconds = min(2 * self._pause_seconds, _LONGEST_PAUSE_SECONDS)
        return self._pause_seconds


async def keep(plugin: CniInstaller) -> None:
    """Install the plugin, and put it back whenever a CNI rewrites its file; for ever."""
    keeper = _Reconciler(plugin)
    while True:
        await keeper.look()
        with contextlib.suppress(FileNotFoundError):
            async for _ in documents.changes(
                plugin.conf_directory, at_least_every_seconds=_LOOK_EVERY_SECONDS
            ):
                await keeper.look()
        await asyncio.sleep(_LOOK_EVERY_SECONDS)  # the directory comes with the CNI


class _Reconciler:
    def __init__(self, plugin: CniInstaller) -> None:
        self._plugin = plugin
        self._turns = Turns()
        self._problem = ""

    async def look(self) -> None:
        problem = ""
        try:
            has_changed = await asyncio.to_thread(self._plugin.install)
        except CniError as error:
            has_changed, problem = False, str(error)
        if problem and problem != self._problem:
            log.warning("new pods do not come by podgate-cni", reason=problem)
        self._problem = problem
        if has_changed:
            pause = self._turns.pause_seconds(asyncio.get_running_loop().time())
            log.info("podgate-cni is in the node's CNI configuration", next_look_seconds=pause)
            await asyncio.sleep(pause)


def _saved(path: pathlib.Path) -> pathlib.Path:
    return path.with_name(path.name + _SAVED)


def _unfinished(path: pathlib.Path) -> pathlib.Path:
    return path.with_name(path.name + _UNFINISHED)


def _restore(original: pathlib.Path) -> bool:
    """Put a file back under its name, unless its CNI has written it anew."""
    if original.exists():
        return _unlink(_saved(original))
    try:
        _saved(original).rename(original)
    except FileNotFoundError:
        return False
    return True


def _read(path: pathlib.Path) -> str:
    """As it is, with its line ends. Raises `ConflistError`, or `OSError`."""
    try:
        return path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise ConflistError("it is not UTF-8") from error


def _replace(
    path: pathlib.Path, content: bytes, *, like: pathlib.Path | None = None, mode: int = 0o644
) -> None:
    """Replace a file, or what a link leads to, in one step that survives a power cut.

    like: whose owner and mode it gets, else the caller's and `mode`.
    """
    path = path.resolve()
    unfinished = _unfinished(path)
    unfinished.unlink(missing_ok=True)
    with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
        if like is None:
            os.fchmod(file.fileno(), mode)
        else:
            status = like.stat()
            os.fchown(file.fileno(), status.st_uid, status.st_gid)
            os.fchmod(file.fileno(), status.st_mode & 0o7777)
        file.flush()
        os.fsync(file.fileno())
    unfinished.rename(path)


def _unlink(path: pathlib.Path) -> bool:
    """Whether it was there."""
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    return True


def _has_content(path: pathlib.Path, wanted: bytes) -> bool:
    try:
        return path.read_bytes() == wanted and os.access(path, os.X_OK)
    except FileNotFoundError:
        return False


def _stamp(path: pathlib.Path) -> tuple[int, int, int]:
    status = path.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns


@contextlib.contextmanager
def _as_cni_error() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CniError(f"{error.filename} cannot be changed: {error.strerror}.") from error


@contextlib.contextmanager
def _naming(path: pathlib.Path) -> Iterator[None]:
    try:
        yield
    except ConflistError as error:
        raise CniError(f"{path} is left as it is: {error}.") from error
