"""Installing and removing the plugin: any content of the directory, and a kill at any step.

`network_of` does what runtimes do: it reads the first file, by name, of those that they read.
"""

import asyncio
import contextlib
import itertools
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import structlog
from click.testing import CliRunner, Result

from agent.cni import conflist, installer
from agent.cni.installer import CniError, CniInstaller
from agent.linux import locks
from agent.logs import Event
from agent.operate.cli.main import main
from agent.settings import Settings
from tests import unprivileged
from tests.polling import until

CONFLIST = '{"cniVersion": "1.0.0", "name": "pods",\n "plugins": [{"type": "ptp"}]}\n'
NETWORK = '{"cniVersion": "0.4.0", "name": "pods", "type": "bridge"}\n'
Directory = dict[str, bytes]


@pytest.fixture
def node(tmp_path: pathlib.Path) -> CniInstaller:
    """A node without any network yet."""
    (tmp_path / "net.d").mkdir()
    (tmp_path / "built").write_bytes(b"\x7fELF")
    return CniInstaller(
        conf_directory=tmp_path / "net.d",
        bin_directory=tmp_path / "bin",
        binary=tmp_path / "built",
    )


def write(node: CniInstaller, files: dict[str, str]) -> Directory:
    for name, text in files.items():
        (node.conf_directory / name).write_text(text)
    return content(node)


def content(node: CniInstaller) -> Directory:
    """Its files; the lock is a directory."""
    files = (path for path in node.conf_directory.iterdir() if path.is_file())
    return {path.name: path.read_bytes() for path in files}


def network_of(node: CniInstaller) -> tuple[str, list[str]]:
    """Name and plugins of the network that a runtime reads."""
    while True:
        name = min(n for n in os.listdir(node.conf_directory) if n.endswith(installer._SUFFIXES))
        # The installer may give it another name meanwhile.
        with contextlib.suppress(FileNotFoundError):
            content = (node.conf_directory / name).read_bytes()
            break
    document: dict[str, Any] = json.loads(content)
    if not name.endswith(".conflist"):
        return document["name"], [document["type"]]
    return document["name"], [plugin["type"] for plugin in document["plugins"]]


NETWORKS = pytest.mark.parametrize(
    ("files", "plugins"),
    [
        pytest.param({"10-x.conflist": CONFLIST}, ["ptp"], id="a list"),
        pytest.param({"10-x.conf": NETWORK}, ["bridge"], id="a single plugin"),
        pytest.param({"10-x.json": NETWORK}, ["bridge"], id="a single plugin as .json"),
        pytest.param({"10-x.conf": NETWORK, "10-x.conflist": CONFLIST}, ["bridge"], id="both"),
        pytest.param(
            {"20-y.conflist": CONFLIST, "10-x.conflist": CONFLIST, "README": "", "0.conf.bak": "{"},
            ["ptp"],
            id="several",
        ),
    ],
)


@NETWORKS
def test_install_and_remove_restore_the_directory(
    node: CniInstaller, files: dict[str, str], plugins: list[str]
) -> None:
    before = write(node, files)
    assert node.install()
    assert network_of(node) == ("pods", [*plugins, "podgate-cni"])
    assert node.installed_binary.read_bytes() == b"\x7fELF"
    assert node.installed_binary.stat().st_mode & 0o7777 == 0o755
    after = content(node)
    assert not node.install()
    assert content(node) == after
    assert node.remove()
    assert content(node) == before
    assert not list(node.bin_directory.iterdir())
    assert not node.remove()


def test_owner_and_mode_of_the_file_stay(node: CniInstaller) -> None:
    write(node, {"10-x.conflist": CONFLIST})
    path = node.conf_directory / "10-x.conflist"
    for mode, owner in ((0o600, 7), (0o2641, 0)):
        os.chown(path, owner, owner + 1)
        path.chmod(mode)
        for change in (node.install, node.remove):
            change()
            status = path.stat()
            found = (status.st_mode & 0o7777, status.st_uid, status.st_gid)
            assert found == (mode, owner, owner + 1)


def test_list_in_place_of_a_single_plugin_has_its_mode(node: CniInstaller) -> None:
    write(node, {"10-x.conf": NETWORK})
    (node.conf_directory / "10-x.conf").chmod(0o640)
    node.install()
    (made,) = node.conf_directory.glob("*.conflist")
    assert made.name == "10-x.conf-podgate.conflist"
    assert made.stat().st_mode & 0o777 == 0o640
    assert (node.conf_directory / "10-x.conf.podgate-saved").read_text() == NETWORK


def test_binary_that_cannot_be_run_is_replaced(node: CniInstaller) -> None:
    write(node, {"10-x.conflist": CONFLIST})
    node.install()
    node.installed_binary.chmod(0o644)
    assert node.install()
    assert os.access(node.installed_binary, os.X_OK)
    assert not node.install()


def test_what_a_killed_process_left_is_removed_and_is_in_no_way(node: CniInstaller) -> None:
    before = write(node, {"10-x.conflist": CONFLIST})
    node.bin_directory.mkdir()
    for path in (node.conf_directory / "10-x.conflist", node.installed_binary):
        path.with_name(path.name + ".podgate-new").write_text("{")
    assert node.remove()
    assert content(node) == before
    assert list(node.bin_directory.iterdir()) == []
    for path in (node.conf_directory / "10-x.conflist", node.installed_binary):
        path.with_name(path.name + ".podgate-new").write_text("{")
    assert node.install()
    assert network_of(node) == ("pods", ["ptp", "podgate-cni"])
    assert sorted(content(node)) == ["10-x.conflist"]
    assert [path.name for path in node.bin_directory.iterdir()] == ["podgate-cni"]


def test_file_that_was_kept_comes_back_unless_there_is_a_newer_one(node: CniInstaller) -> None:
    saved = {"10-x.conf.podgate-saved": NETWORK}
    write(node, saved)
    assert node.remove()
    assert content(node) == {"10-x.conf": NETWORK.encode()}
    newer = NETWORK.replace("pods", "newer")
    write(node, {**saved, "10-x.conf": newer})
    assert node.remove()
    assert content(node) == {"10-x.conf": newer.encode()}
    assert not node.remove()


def test_removal_needs_no_directory_and_leaves_no_lock(node: CniInstaller) -> None:
    write(node, {"10-x.conflist": CONFLIST})
    node.install()
    node.remove()
    assert [path.name for path in node.conf_directory.iterdir()] == ["10-x.conflist"]
    node.install()
    (node.conf_directory / "10-x.conflist").unlink()
    node.conf_directory.rmdir()
    assert node.remove()
    assert not node.remove()
    assert not node.conf_directory.exists()


def test_list_in_a_file_of_another_kind_is_left_alone(node: CniInstaller) -> None:
    before = write(node, {"10-x.json": CONFLIST.replace("ptp", "podgate-cni")})
    assert not node.remove()
    assert content(node) == before


def test_file_that_is_being_rewritten_is_left_alone(
    node: CniInstaller, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(node, {"10-x.conflist": CONFLIST})
    path = node.conf_directory / "10-x.conflist"
    newer = CONFLIST.replace("pods", "newer")
    with_entry = conflist.with_entry

    def rewrite(text: str, entry: conflist.Entry) -> str:
        path.write_text(newer)
        return with_entry(text, entry)

    monkeypatch.setattr(conflist, "with_entry", rewrite)
    with pytest.raises(CniError) as caught:
        node.install()
    assert str(caught.value) == f"{path} is being rewritten; try again."
    assert path.read_text() == newer


def test_entry_has_no_default_values() -> None:
    assert CniInstaller().entry == {"type": "podgate-cni"}


@pytest.mark.parametrize("is_strict", [True, False])
def test_installer_is_that_of_the_agent_s_settings(tmp_path: pathlib.Path, is_strict: bool) -> None:
    settings = Settings(manifests=tmp_path, run_directory=tmp_path)
    assert CniInstaller.of(settings) is None
    found = CniInstaller.of(
        msgspec.structs.replace(
            settings,
            cni_conf_directory=tmp_path / "net.d",
            cni_bin_directory=tmp_path / "bin",
            cni_strict_start=is_strict,
            bpffs=tmp_path / "bpf",
        )
    )
    assert found == CniInstaller(
        conf_directory=tmp_path / "net.d",
        bin_directory=tmp_path / "bin",
        is_strict=is_strict,
        run_directory=tmp_path,
        bpffs=tmp_path / "bpf",
    )


def test_error_of_the_file_system_is_one_sentence(node: CniInstaller) -> None:
    write(node, {"10-x.conflist": CONFLIST})
    node.bin_directory.write_text("")
    with pytest.raises(CniError) as caught:
        node.install()
    assert str(caught.value) == f"{node.installed_binary} cannot be changed: Not a directory."


def test_target_of_a_link_is_changed(node: CniInstaller, tmp_path: pathlib.Path) -> None:
    (tmp_path / "elsewhere.conflist").write_text(CONFLIST)
    (node.conf_directory / "10-x.conflist").symlink_to(tmp_path / "elsewhere.conflist")
    node.install()
    assert (node.conf_directory / "10-x.conflist").is_symlink()
    assert network_of(node)[1] == ["ptp", "podgate-cni"]


def test_options_are_in_the_entry(node: CniInstaller) -> None:
    write(node, {"10-x.conflist": CONFLIST})
    node.install()
    other = CniInstaller(
        conf_directory=node.conf_directory,
        bin_directory=node.bin_directory,
        binary=node.binary,
        is_strict=True,
        run_directory=pathlib.Path("/run/other"),
        bpffs=pathlib.Path("/bpf"),
    )
    assert other.install()
    document = json.loads((node.conf_directory / "10-x.conflist").read_bytes())
    assert document["plugins"][1:] == [
        {
            **{"type": "podgate-cni", "strictStart": True},
            **{"runDirectory": "/run/other", "bpffs": "/bpf"},
        }
    ]


def test_newer_binary_replaces_the_old(node: CniInstaller) -> None:
    write(node, {"10-x.conflist": CONFLIST})
    node.install()
    node.binary.write_bytes(b"newer")
    assert node.install()
    assert node.installed_binary.read_bytes() == b"newer"


def test_directory_of_binaries_is_made(node: CniInstaller, tmp_path: pathlib.Path) -> None:
    write(node, {"10-x.conflist": CONFLIST})
    other = msgspec.structs.replace(node, bin_directory=tmp_path / "opt" / "cni" / "bin")
    umask = os.umask(0)
    try:
        assert other.install()
    finally:
        os.umask(umask)
    assert other.installed_binary.read_bytes() == b"\x7fELF"
    assert other.bin_directory.stat().st_mode & 0o7777 == 0o755


def test_binary_is_kept_on_request(node: CniInstaller) -> None:
    write(node, {"10-x.conflist": CONFLIST})
    node.install()
    node.remove(is_binary_kept=True)
    assert node.installed_binary.exists()


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "has no CNI configuration yet; install a CNI first"),
        ({"10-x.conflist": "{"}, "10-x.conflist is unchanged: it is not a CNI configuration"),
        ({"10-x.conf": "{"}, "10-x.conf is unchanged: it is not a CNI configuration"),
        ({"10-x.conflist": CONFLIST.replace("1.0.0", "0.2.0")}, "its cniVersion is 0.2.0"),
    ],
)
def test_invalid_configuration_is_unchanged(
    node: CniInstaller, files: dict[str, str], words: str
) -> None:
    before = write(node, files)
    with pytest.raises(CniError, match=words) as error:
        node.install()
    assert str(error.value).count("\n") == 0
    assert content(node) == before
    node.remove()
    assert content(node) == before


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("05-x.conflist", "{"),
        ("05-x.conflist", CONFLIST.replace('"name": "pods",', "")),
        ("05-x.conf", NETWORK.replace('"bridge"', "null")),
        ("05-x.json", "\x00"),
    ],
)
def test_next_file_is_taken_where_the_first_is_invalid(
    node: CniInstaller, name: str, text: str
) -> None:
    before = write(node, {name: text, "10-x.conflist": CONFLIST})
    assert node.install()
    assert not node.install()
    after = content(node)
    assert after[name] == text.encode()
    assert b"podgate-cni" in after["10-x.conflist"]
    node.remove()
    assert content(node) == before


def test_file_that_only_podgate_rejects_is_not_skipped(node: CniInstaller) -> None:
    """Runtimes read it."""
    before = write(
        node, {"05-x.conflist": CONFLIST.replace("1.0.0", "9.0.0"), "10-x.conflist": CONFLIST}
    )
    with pytest.raises(CniError, match=r"05-x.conflist is unchanged: its cniVersion is 9\.0\.0"):
        node.install()
    assert content(node) == before


@pytest.mark.parametrize("name", ["05-backup.conf", "05-backup.conflist"])
def test_directory_is_no_network(node: CniInstaller, name: str) -> None:
    (node.conf_directory / name).mkdir()
    write(node, {"10-x.conflist": CONFLIST})
    assert node.install()
    assert b"podgate-cni" in content(node)["10-x.conflist"]


def test_link_to_a_directory_is_a_network_that_cannot_be_read(
    node: CniInstaller, tmp_path: pathlib.Path
) -> None:
    """As for runtimes."""
    (tmp_path / "elsewhere").mkdir()
    path = node.conf_directory / "05-x.conf"
    path.symlink_to(tmp_path / "elsewhere")
    write(node, {"10-x.conflist": CONFLIST})
    with pytest.raises(CniError) as caught:
        node.install()
    assert str(caught.value) == f"{path} cannot be changed: Is a directory."


def test_text_of_another_encoding_is_unchanged(node: CniInstaller) -> None:
    (node.conf_directory / "10-x.conflist").write_bytes(b"\xff")
    with pytest.raises(CniError, match="is unchanged: it is not UTF-8"):
        node.install()
    node.remove()


def test_missing_binary_is_one_sentence(node: CniInstaller) -> None:
    before = write(node, {"10-x.conflist": CONFLIST})
    node.binary.unlink()
    with pytest.raises(CniError, match=r"cannot be read .* build it with 'make setup'"):
        node.install()
    assert content(node) == before


def test_rewritten_single_plugin_becomes_a_list_again(node: CniInstaller) -> None:
    write(node, {"10-x.conf": NETWORK})
    node.install()
    newer = NETWORK.replace("pods", "newer")
    write(node, {"10-x.conf": newer})
    assert node.install()
    assert network_of(node) == ("newer", ["bridge", "podgate-cni"])
    node.remove()
    assert content(node) == {"10-x.conf": newer.encode()}


# For each line of its input a child, which is killed at its nth system call that changes files or
# directories; prints how that ended. To import the installer takes longer than all calls.
_KILLED = """
import os, pathlib, signal, sys
from agent.cni.installer import CniInstaller

def counted(function):
    def call(*arguments, **options):
        global left
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1
        return function(*arguments, **options)
    return call

for name in ("open", "rename", "unlink", "fchmod", "fsync"):
    setattr(os, name, counted(getattr(os, name)))
paths = [pathlib.Path(path) for path in sys.argv[1:]]
plugin = CniInstaller(conf_directory=paths[0], bin_directory=paths[1], binary=paths[2])
for line in sys.stdin:
    step, command = line.split()
    left = int(step)
    child = os.fork()
    if child == 0:
        getattr(plugin, command)()
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture
def killed(node: CniInstaller) -> Iterator[subprocess.Popen[str]]:
    """The process whose children are killed."""
    paths = map(str, (node.conf_directory, node.bin_directory, node.binary))
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", _KILLED, *paths], stdin=pipe, stdout=pipe, text=True
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()
    assert process.returncode == 0


def until_done(killed: subprocess.Popen[str], command: str) -> Iterator[None]:
    """Yields after each step at which the process can be killed."""
    assert killed.stdin is not None
    assert killed.stdout is not None
    for step in itertools.count():
        killed.stdin.write(f"{step} {command}\n")
        killed.stdin.flush()
        status = killed.stdout.readline()
        if status == "0\n":
            return
        assert status == "-9\n"
        yield


@pytest.mark.parametrize(
    ("files", "plugins"),
    [({"10-x.conflist": CONFLIST}, ["ptp"]), ({"10-x.conf": NETWORK}, ["bridge"])],
)
def test_kill_at_any_step_leaves_a_network(
    node: CniInstaller,
    killed: subprocess.Popen[str],
    files: dict[str, str],
    plugins: list[str],
) -> None:
    before = write(node, files)
    states = 0
    for _ in until_done(killed, "install"):
        states += 1
        name, found = network_of(node)
        assert (name, found) in [("pods", plugins), ("pods", [*plugins, "podgate-cni"])]
        assert "podgate-cni" not in found or node.installed_binary.read_bytes() == b"\x7fELF"
        # Each time from the beginning, or a later step would never be reached.
        node.remove()
        assert content(node) == before
    assert states > 5
    for _ in until_done(killed, "remove"):
        name, found = network_of(node)
        assert (name, found) in [("pods", plugins), ("pods", [*plugins, "podgate-cni"])]
        assert "podgate-cni" not in found or node.installed_binary.exists()
        node.install()
    assert content(node) == before


def has_plugin(node: CniInstaller) -> bool:
    try:
        return "podgate-cni" in network_of(node)[1]
    except (ValueError, OSError):
        return False


async def test_agent_restores_the_plugin(node: CniInstaller) -> None:
    keeping = asyncio.create_task(installer.run(node))
    try:
        await asyncio.sleep(0.01)  # no network yet
        write(node, {"10-x.conflist": CONFLIST})
        await until("the network has the plugin", lambda: has_plugin(node))
        for number in range(3):
            newer = node.conf_directory / ".newer"
            newer.write_text(CONFLIST.replace("pods", f"pods{number}"))
            newer.rename(node.conf_directory / "10-x.conflist")
            await until("the network has the plugin", lambda: has_plugin(node))
            assert network_of(node)[0] == f"pods{number}"
        # An earlier file, as of a CNI that is put in another's place.
        write(node, {"05-y.conf": NETWORK})
        await until(
            "the new network has the plugin",
            lambda: network_of(node)[1] == ["bridge", "podgate-cni"],
        )
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)


def run_remove(node: CniInstaller) -> Result:
    where = [
        *("--cni-conf-dir", str(node.conf_directory)),
        *("--cni-bin-dir", str(node.bin_directory)),
    ]
    return CliRunner().invoke(main, ["cni", "remove", *where])


async def test_remove_fails_while_an_agent_keeps_the_plugin_installed(
    node: CniInstaller,
) -> None:
    keeping = asyncio.create_task(installer.run(node))
    try:
        write(node, {"10-x.conflist": CONFLIST})
        await until("the network has the plugin", lambda: has_plugin(node))
        before = content(node)
        # Its own log lines are not part of the command's output.
        with structlog.testing.capture_logs():
            refused = await asyncio.to_thread(run_remove, node)
        assert refused.exit_code == 1
        assert content(node) == before
        assert node.installed_binary.exists()
        assert refused.output == (
            f"podgate: a running agent keeps podgate-cni in {node.conf_directory} and would add it "
            "again; restart the agent without --cni-conf-dir, or stop it, then repeat this "
            "command.\n"
        )
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
    assert (await asyncio.to_thread(run_remove, node)).output == "Removed.\n"


@pytest.mark.kernel
@pytest.mark.parametrize("kind", ["ex", "sh"])
def test_locks_that_a_user_holds_keep_the_plugin_neither_out_nor_in(kind: str) -> None:
    with unprivileged.visible_directory() as directory:
        node = CniInstaller(
            conf_directory=directory / "net.d",
            bin_directory=directory / "bin",
            binary=directory / "built",
        )
        node.conf_directory.mkdir()
        node.binary.write_bytes(b"\x7fELF")
        before = write(node, {"10-x.conflist": CONFLIST})
        with unprivileged.running(unprivileged.FLOCK, str(node.conf_directory), kind) as held:
            assert int(held)
            asyncio.run(keep_for_a_moment(node))
            assert has_plugin(node)
        with unprivileged.running(unprivileged.FLOCK, str(node.conf_directory), kind):
            assert run_remove(node).output == "Removed.\n"
        assert content(node) == before
        assert not node.lock.exists()


async def keep_for_a_moment(node: CniInstaller) -> None:
    keeping = asyncio.create_task(installer.run(node))
    await until("the network has the plugin", lambda: has_plugin(node))
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)


async def test_agent_that_finds_the_plugin_being_removed_reports_that(
    node: CniInstaller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installer, "_CHECK_SECONDS", 0.05)
    write(node, {"10-x.conflist": CONFLIST})
    status = installer.PluginStatus(is_installed=True)
    with structlog.testing.capture_logs() as logged, locks.held(node.lock):
        keeping = asyncio.create_task(installer.run(node, status))
        await until("the report", lambda: bool(logged))
        assert not status.is_installed
        await asyncio.sleep(0.1)
    await until("the plugin", lambda: status.is_installed)
    assert has_plugin(node)
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)
    (line,) = (line for line in logged if line["event"] is Event.CNI_PLUGIN_NOT_INSTALLED)
    assert "is being removed" in line["problem"]


async def test_remove_fails_also_for_a_directory_that_was_created_again(
    node: CniInstaller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installer, "_CHECK_SECONDS", 0.05)
    write(node, {"10-x.conflist": CONFLIST})
    keeping = asyncio.create_task(installer.run(node))
    try:
        await until("the network has the plugin", lambda: has_plugin(node))
        node.conf_directory.rename(node.conf_directory.with_name("old.d"))
        await asyncio.sleep(0.1)
        node.conf_directory.mkdir()
        write(node, {"10-x.conflist": CONFLIST})
        await until("the network has the plugin", lambda: has_plugin(node))
        assert (await asyncio.to_thread(run_remove, node)).exit_code == 1
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)


async def test_remove_fails_also_for_a_directory_that_was_exchanged(
    node: CniInstaller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installer, "_CHECK_SECONDS", 0.5)
    write(node, {"10-x.conflist": CONFLIST})
    keeping = asyncio.create_task(installer.run(node))
    try:
        await until("the network has the plugin", lambda: has_plugin(node))
        new = node.conf_directory.with_name("new.d")
        new.mkdir()
        (new / "10-x.conflist").write_text(CONFLIST)
        node.conf_directory.rename(node.conf_directory.with_name("old.d"))
        new.rename(node.conf_directory)
        await until("the new one has the plugin", lambda: has_plugin(node))
        assert (await asyncio.to_thread(run_remove, node)).exit_code == 1
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)


def test_pauses_between_rewrites_double() -> None:
    backoff = installer.RewriteBackoff()
    now, pauses = 0.0, []
    for _ in range(12):
        pauses.append(backoff.pause_seconds(now))
        now += pauses[-1] + 0.3
    assert pauses[:3] == [0.1, 0.2, 0.4]
    assert pauses[-1] == 60
    # The previous rewrite was two minutes before, or longer.
    assert backoff.pause_seconds(now + 59.7) == 60
    assert backoff.pause_seconds(now + 59.7 + 120.1) == 0.1


def test_commands_report_what_they_did(node: CniInstaller) -> None:
    before = write(node, {"10-x.conflist": CONFLIST})
    where = [
        *("--cni-conf-dir", str(node.conf_directory)),
        *("--cni-bin-dir", str(node.bin_directory)),
    ]
    install = ["cni", "install", *where, "--binary", str(node.binary), "--cni-strict-start"]
    runner = CliRunner()
    assert runner.invoke(main, install).output == "Installed.\n"
    assert runner.invoke(main, install).output == "Nothing to do: already installed.\n"
    assert "strictStart" in (node.conf_directory / "10-x.conflist").read_text()
    assert runner.invoke(main, ["cni", "remove", *where]).output == "Removed.\n"
    assert content(node) == before
    assert "Nothing to do" in runner.invoke(main, ["cni", "remove", *where]).output
    (node.conf_directory / "10-x.conflist").unlink()
    failed = runner.invoke(main, install)
    assert failed.exit_code == 1
    assert "podgate: " in failed.output
    assert "Traceback" not in failed.output
