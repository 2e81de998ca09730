"""deploy/client/go-stubs.sh, with programs of the test in place of Go and its plugins."""

import pathlib
import shutil
import subprocess
import sys

import pytest

_SCRIPT = pathlib.Path(__file__).parents[3] / "deploy" / "client" / "go-stubs.sh"
# protoc sends its request to a plugin's standard input, and reads an empty response as "no files".
_PLUGIN = "#!/bin/sh\ncat >{log}\n"
_GO = (
    '#!/bin/sh\necho "$GO111MODULE $GOPATH $* in $PWD" >>{log}\n[ "$1" != vet ] || exit {status}\n'
)


@pytest.fixture
def programs(tmp_path: pathlib.Path) -> pathlib.Path:
    """A PATH with what the script needs of the system."""
    directory = tmp_path / "bin"
    directory.mkdir()
    for name in ("cat", "dirname", "mkdir", "rm", "sh"):
        (directory / name).symlink_to(shutil.which(name) or name)
    return directory


def add(programs: pathlib.Path, name: str, text: str) -> None:
    (programs / name).write_text(text)
    (programs / name).chmod(0o755)


def run(programs: pathlib.Path) -> "subprocess.CompletedProcess[str]":
    target = programs.parent / "go"
    return subprocess.run(
        [_SCRIPT, sys.executable, target],
        env={"PATH": str(programs)},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_missing_program_is_one_sentence(programs: pathlib.Path) -> None:
    add(programs, "go", "#!/bin/sh\n")
    done = run(programs)
    assert done.returncode == 1
    assert done.stderr.startswith("protoc-gen-go is missing; install Debian's golang-go,")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("status", [0, 1])
def test_stubs_are_made_for_both_apis_and_compiled(programs: pathlib.Path, status: int) -> None:
    logs = {name: programs.parent / name for name in ("protoc-gen-go", "protoc-gen-go-grpc")}
    for name, log in logs.items():
        add(programs, name, _PLUGIN.format(log=log))
    calls = programs.parent / "calls"
    add(programs, "go", _GO.format(log=calls, status=status))
    done = run(programs)
    assert done.returncode == status, done.stderr
    for log in logs.values():
        request = log.read_bytes()
        assert b"podgate.io/api/localnet/v1alpha1" in request
        assert b"podgate.io/api/podinfo/v1alpha1" in request
    target = programs.parent / "go"
    module = target / "src" / "podgate.io" / "api"
    compiled, *rest = calls.read_text().splitlines()
    assert compiled == f"off {target}:/usr/share/gocode vet ./... in {module}"
    # No module is declared that does not compile.
    assert [line.split(" ", 2)[2] for line in rest] == (
        [] if status else [f"mod init podgate.io/api in {module}"]
    )
