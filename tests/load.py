"""Keeps all processors busy, for tests that are to pass beside a load."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

# It ends with the process that started it, however that ends.
_LOOP = """
import os, sys
while os.getppid() == int(sys.argv[1]):
    for _ in range(1_000_000):
        pass
"""


@contextlib.contextmanager
def busy_processors() -> Iterator[list[int]]:
    """As many endless loops as there are processors; their process ids."""
    command = [sys.executable, "-c", _LOOP, str(os.getpid())]
    with contextlib.ExitStack() as started:
        loops = []
        for _ in range(os.cpu_count() or 1):
            loop = subprocess.Popen(command)
            started.callback(loop.wait)
            started.callback(loop.kill)
            loops.append(loop.pid)
        yield loops
