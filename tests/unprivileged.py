"""Attacks by a process that has no rights at all: user 65534, without groups."""

import contextlib
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator

USER = 65534

_DROP = f"""
import os, sys
os.setgroups([]); os.setgid({USER}); os.setuid({USER})
def ready(*found):
    print(*found, flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def running(program: str, *arguments: str, user: int = USER) -> Iterator[str]:
    """Run Python code as that user until the block ends; yields what it passes to `ready`."""
    with subprocess.Popen(
        [sys.executable, "-c", _DROP.replace(str(USER), str(user)) + program, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout
        try:
            yield process.stdout.readline().strip()
        finally:
            process.kill()


@contextlib.contextmanager
def visible_directory() -> Iterator[pathlib.Path]:
    """A directory that every user may enter, as /run is: pytest's are for its user only. Where
    TMPDIR is, or /tmp."""
    with tempfile.TemporaryDirectory(prefix="podgate-") as name:
        path = pathlib.Path(name)
        path.chmod(0o755)
        yield path


FLOCK = """
import fcntl, threading
kind = fcntl.LOCK_EX if sys.argv[2] == "ex" else fcntl.LOCK_SH
held = []
for directory, directories, files in os.walk(sys.argv[1]):
    for path in [directory, *(os.path.join(directory, name) for name in files)]:
        try:
            # A descriptor that reads is enough.
            held.append(os.open(path, os.O_RDONLY))
        except OSError:
            pass
for descriptor in held:
    threading.Thread(target=fcntl.flock, args=(descriptor, kind), daemon=True).start()
ready(len(held))
"""
"""Waits for the lock of all that this user can open in a directory, and holds it. Arguments: the
directory, and ex or sh."""

SQUAT_PORT = """
import socket
address = sys.argv[1], int(sys.argv[2])
while True:
    taken = socket.socket()
    try:
        taken.bind(address)
        break
    except OSError:
        taken.close()
if sys.argv[3] == "listening":
    taken.listen()
ready(os.getpid())
"""
"""Waits for a port of TCP, and holds it. Arguments: address, port, and listening or bound."""
