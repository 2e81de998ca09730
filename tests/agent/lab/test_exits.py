"""A process ends with its last thread, which may be another one than its first."""

import pathlib
import subprocess

from agent.lab.exits import has_ended
from tests.polling import wait_until
from tests.processes import BARE_PYTHON

_FIRST_THREAD_ENDS = """
import ctypes, sys, threading
threading.Thread(target=sys.stdin.read).start()
ctypes.CDLL(None).pthread_exit(None)
"""


def test_process_has_ended_once_its_last_thread_has_though_it_is_a_zombie() -> None:
    process = subprocess.Popen([*BARE_PYTHON, "-c", _FIRST_THREAD_ENDS], stdin=subprocess.PIPE)
    namespaces = pathlib.Path(f"/proc/{process.pid}/ns/net")
    wait_until("the end of its first thread", lambda: not namespaces.exists())
    assert not has_ended(process.pid)
    process.kill()
    wait_until("its end", lambda: has_ended(process.pid))
    assert namespaces.parent.exists()
    process.communicate()
    assert has_ended(process.pid)
