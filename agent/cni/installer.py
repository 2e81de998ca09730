"""Adds `podgate-cni` to a node's CNI configuration, keeps it there, and removes it.

Runtimes use the first file of the directory, by name, that ends in .conf, .conflist or .json. CRI-O
skips invalid ones (ocicni), and containerd starts no pod beside one (go-cni): podgate skips them. A
list gets one more plugin; a file of a single plugin is replaced by a list next to it, and kept
under a name that runtimes do not read. Files are replaced by renaming, in an order in which every
step leaves a working directory, also if the process is killed in between.
"""

import asyncio
import contextlib
import dataclasses
import os
import pathlib
import sys
from collections.abc import Iterator

import msgspec
import structlog

from agent.backoff import Backoff, no_jitter
from agent.cni import conflist
from agent.cni.conflist import ConflistError, Entry, InvalidConflistError
from agent.errors import PodgateError
from agent.linux import directory_changes, locks
from agent.linux.directories import DirectoryError
from agent.linux.locks import AlreadyRunningError, LockError
from agent.logs import Event
from agent.settings import CNI_BIN_DIRECTORY, CNI_CONF_DIRECTORY, RUN_DIRECTORY, Settings
from bpf import pins

log = structlog.get_logger(__name__)

BUILT = pathlib.Path(sys.prefix) / "bin" / conflist.TYPE
"""The plugin built by `make setup`, in the directory of the `podgate` command."""

_SUFFIXES = (".conf", ".conflist", ".json")
# Sorts directly after the file that it replaces, and before all others.
_MADE = "-podgate.conflist"
_SAVED = ".podgate-saved"
_UNFINISHED = ".podgate-new"
_LOCK = ".podgate-lock"

# Without an event: the plugin's binary, or the whole directory, may have been removed.
_CHECK_SECONDS = 10.0
# Some CNIs restore their file at once when it changes; two programs that do so would rewrite it
# forever, so the pauses double.
_FIRST_PAUSE_SECONDS = 0.1
_MAX_PAUSE_SECONDS = 60.0


class CniError(PodgateError):
    """The node's CNI configuration is unchanged; the message is one sentence."""


class CniInstaller(msgspec.Struct, frozen=True, kw_only=True):
    """Installs and removes the plugin on this node."""

    conf_directory: pathlib.Path = CNI_CONF_DIRECTORY
    bin_directory: pathlib.Path = CNI_BIN_DIRECTORY
    binary: pathlib.Path = BUILT
    """The file that is copied to `bin_directory`."""

    is_strict: bool = False
    """Pods wait for gates rather than start without them, above all after a reboot."""

    run_directory: pathlib.Path = RUN_DIRECTORY
    bpffs: pathlib.Path = pathlib.Path(pins.DEFAULT_BPFFS)
    """These two as the runtime sees them, in the node's own mount namespace."""

    @property
    def entry(self) -> Entry:
        """The plugin's configuration, without default values."""
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
        """The installer for the agent's settings; None if they have no CNI directory."""
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
    def no_network(self) -> str:
        """The problem of a directory without a network, or of a missing one."""
        return (
            f"{self.conf_directory} has no CNI configuration yet; install a CNI first, or set "
            "another directory with --cni-conf-dir."
        )

    @property
    def lock(self) -> pathlib.Path:
        """Held by what keeps the plugin in the configuration, and by what removes it. Runtimes read
        files only."""
        return self.conf_directory / _LOCK

    @property
    def installed_binary(self) -> pathlib.Path:
        return self.bin_directory / conflist.TYPE

    def install(self) -> bool:
        """Make the plugin part of every new pod's ADD; returns whether anything changed.

        Raises `CniError`.
        """
        with _as_cni_error():
            # The binary first: with a list that names a missing plugin no pod starts.
            has_changed = self._copy_binary()
            return self._add_entry() or has_changed

    def remove(self, *, is_binary_kept: bool = False) -> bool:
        """Restore both directories; returns whether there was anything to remove.

        is_binary_kept: for runtimes that stop pods by the list that started them (CRI-O).
        Raises `CniError`, also while an agent keeps the plugin installed.
        """
        with _as_cni_error(), self._exclusive():
            has_changed = False
            if self.conf_directory.is_dir():
                for path in sorted(self.conf_directory.iterdir()):
                    has_changed |= self._remove_entry(path)
            if not is_binary_kept:
                for path in (self.installed_binary, _unfinished(self.installed_binary)):
                    has_changed |= _unlink(path)
            return has_changed

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Keeps agents from adding the plugin. Raises `CniError` if one would add it again."""
        if not self.conf_directory.is_dir():
            yield
            return
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(locks.held(self.lock))
            except AlreadyRunningError as error:
                raise CniError(
                    f"a running agent keeps {conflist.TYPE} in {self.conf_directory} and would add "
                    "it again; restart the agent without --cni-conf-dir, or stop it, then repeat "
                    "this command."
                ) from error
            yield
            self.lock.rmdir()

    def _copy_binary(self) -> bool:
        try:
            content = self.binary.read_bytes()
        except OSError as error:
            raise CniError(
                f"{self.binary} cannot be read ({error.strerror}); build it with 'make setup', or "
                "set another one with --binary."
            ) from error
        if _has_content(self.installed_binary, content):
            return False
        self.bin_directory.mkdir(mode=0o755, parents=True, exist_ok=True)
        _replace(self.installed_binary, content, mode=0o755)
        return True

    def _add_entry(self) -> bool:
        """Raises `CniError`, about the first file if all are invalid."""
        first_problem: CniError | None = None
        for path in self._networks():
            try:
                return self._add_entry_to(path)
            except InvalidConflistError as error:
                first_problem = first_problem or _unchanged(path, error)
            except ConflistError as error:
                raise _unchanged(path, error) from error
        raise first_problem or CniError(self.no_network)

    def _add_entry_to(self, path: pathlib.Path) -> bool:
        stamp = _stamp(path)
        text = _read(path)
        if path.suffix == ".conflist":
            changed, target = conflist.with_entry(text, self.entry), path
        else:
            changed = conflist.from_network(text, self.entry)
            target = path.with_name(path.name + _MADE)
        if changed == text:
            return False
        if _stamp(path) != stamp:
            raise CniError(f"{path} is being rewritten; try again.")
        _replace(target, changed.encode(), like=path)
        if target != path:
            # Up to here the runtime reads the old file, from here on the new one.
            path.rename(_saved(path))
        return True

    def _networks(self) -> list[pathlib.Path]:
        """The files of which runtimes read the first valid one."""
        try:
            with os.scandir(self.conf_directory) as entries:
                # Not a link to a directory, as libcni's ConfFiles.
                names = [e.name for e in entries if not e.is_dir(follow_symlinks=False)]
        except FileNotFoundError:
            names = []
        return [self.conf_directory / name for name in sorted(names) if name.endswith(_SUFFIXES)]

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
        # An invalid file is no network, and has no entry of podgate's.
        with contextlib.suppress(ConflistError):
            text = _read(path)
            if conflist.has_entry(text):
                _replace(path, conflist.without_entry(text).encode(), like=path)
                return True
        return False


class RewriteBackoff:
    """Pauses after each rewrite, so that two programs that insist do not race."""

    def __init__(self) -> None:
        self._backoff = Backoff(
            base_seconds=_FIRST_PAUSE_SECONDS, cap_seconds=_MAX_PAUSE_SECONDS, jitter=no_jitter
        )
        self._changed_at: float | None = None

    def pause_seconds(self, now_seconds: float) -> float:
        """The pause after a rewrite now: doubles, unless the previous rewrite is long ago."""
        last, self._changed_at = self._changed_at, now_seconds
        if last is not None and now_seconds - last > 2 * _MAX_PAUSE_SECONDS:
            self._backoff.reset()
        return self._backoff.next_seconds()


async def run(plugin: CniInstaller, status: "PluginStatus | None" = None) -> None:
    """Install the plugin, and again whenever a CNI rewrites its file, until cancelled.

    It holds the lock by which `CniInstaller.remove` recognises it.
    """
    status = status or PluginStatus()
    reconciler = _Reconciler(plugin, status)
    directory = plugin.conf_directory
    while True:
        try:
            with locks.held(plugin.lock) as lock:
                await reconciler.check()
                async for _ in directory_changes.follow(
                    directory, at_least_every_seconds=_CHECK_SECONDS
                ):
                    # Another directory of this name is locked before anything is written there.
                    if not await asyncio.to_thread(locks.is_current, plugin.lock, lock):
                        break
                    await reconciler.check()
        except FileNotFoundError:
            reconciler.report(plugin.no_network)  # the directory comes with the CNI
            await asyncio.sleep(_CHECK_SECONDS)
        except AlreadyRunningError:
            reconciler.report(f"it is being removed from {directory} by hand.")
            await asyncio.sleep(_CHECK_SECONDS)
        except (DirectoryError, LockError) as error:
            reconciler.report(str(error))
            await asyncio.sleep(_CHECK_SECONDS)


@dataclasses.dataclass(slots=True)
class PluginStatus:
    """Whether new pods get their gate from the plugin."""

    is_installed: bool = False


class _Reconciler:
    """Installs the plugin when it is missing, with a pause after each rewrite."""

    def __init__(self, plugin: CniInstaller, status: PluginStatus) -> None:
        self._plugin = plugin
        self._status = status
        self._backoff = RewriteBackoff()
        self._problem = ""

    async def check(self) -> None:
        problem = ""
        try:
            has_changed = await asyncio.to_thread(self._plugin.install)
        except CniError as error:
            has_changed, problem = False, str(error)
        self.report(problem)
        if has_changed:
            pause = self._backoff.pause_seconds(asyncio.get_running_loop().time())
            log.info(Event.CNI_PLUGIN_INSTALLED, next_check_seconds=pause)
            await asyncio.sleep(pause)

    def report(self, problem: str) -> None:
        """Log why the plugin is not installed, once; empty if it is."""
        if problem and problem != self._problem:
            log.warning(Event.CNI_PLUGIN_NOT_INSTALLED, problem=problem)
        self._problem = problem
        self._status.is_installed = not problem


def _saved(path: pathlib.Path) -> pathlib.Path:
    return path.with_name(path.name + _SAVED)


def _unfinished(path: pathlib.Path) -> pathlib.Path:
    return path.with_name(path.name + _UNFINISHED)


def _restore(original: pathlib.Path) -> bool:
    """Restore a file under its name, unless its CNI has written a new one."""
    if original.exists():
        return _unlink(_saved(original))
    try:
        _saved(original).rename(original)
    except FileNotFoundError:
        return False
    return True


def _read(path: pathlib.Path) -> str:
    """The text, with its line endings. Raises `ConflistError` or `OSError`."""
    try:
        return path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise InvalidConflistError("it is not UTF-8") from error


def _replace(
    path: pathlib.Path, content: bytes, *, like: pathlib.Path | None = None, mode: int = 0o644
) -> None:
    """Replace a file, or a link's target, in one step that survives a power cut.

    like: the file whose owner and mode it gets; default: the process' owner and `mode`.
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
    """Returns whether the file existed."""
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    return True


def _has_content(path: pathlib.Path, content: bytes) -> bool:
    try:
        return path.read_bytes() == content and os.access(path, os.X_OK)
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


def _unchanged(path: pathlib.Path, error: ConflistError) -> CniError:
    return CniError(f"{path} is unchanged: {error}.")
