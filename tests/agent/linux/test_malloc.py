"""What the C library keeps after `malloc.keep_little`, in a process of its own."""

import pathlib
import subprocess
import sys

_ARENAS = """
import ctypes, sys, threading
from agent.linux import malloc
if sys.argv[2] == "little":
    malloc.keep_little()
libc = ctypes.CDLL(None)
libc.malloc.restype = libc.fopen.restype = ctypes.c_void_p
barrier = threading.Barrier(4)
def allocate():
    libc.malloc(1000)
    barrier.wait()
threads = [threading.Thread(target=allocate) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
file = ctypes.c_void_p(libc.fopen(sys.argv[1].encode(), b"w"))
libc.malloc_info(0, file)
libc.fclose(file)
"""


def _arenas(path: pathlib.Path, how: str) -> int:
    subprocess.run([sys.executable, "-c", _ARENAS, path, how], check=True, timeout=60)
    return path.read_text().count("<heap nr=")


def test_threads_share_one_arena(tmp_path: pathlib.Path) -> None:
    assert _arenas(tmp_path / "usual.xml", "usual") > 1
    assert _arenas(tmp_path / "little.xml", "little") == 1


_LARGE = """
import ctypes
from agent.linux import malloc
malloc.keep_little()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096
def use(size):
    block = ctypes.c_void_p(libc.malloc(size))
    ctypes.memset(block, 1, size)
    return block
# By default blocks of less than this would have no pages of their own from here on.
libc.free(use(16 << 20))
block = use(8 << 20)
above = use(4096)
before = resident()
libc.free(block)
print(before - resident())
"""


def test_large_block_is_given_back_when_it_is_freed() -> None:
    run = subprocess.run(
        [sys.executable, "-c", _LARGE], capture_output=True, text=True, check=True, timeout=60
    )
    assert int(run.stdout) > 7 << 20


_SMALL = """
import ctypes
from agent.linux import malloc
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096
blocks = []
for _ in range(8192):
    blocks.append(ctypes.c_void_p(libc.malloc(2048)))
    ctypes.memset(blocks[-1], 1, 2048)
# What is freed below it stays otherwise.
above = libc.malloc(2048)
before = resident()
for block in blocks:
    libc.free(block)
malloc.give_back()
print(before - resident())
"""


def test_small_blocks_are_given_back_at_once_when_that_is_requested() -> None:
    run = subprocess.run(
        [sys.executable, "-c", _SMALL], capture_output=True, text=True, check=True, timeout=60
    )
    assert int(run.stdout) > 12 << 20
