"""Holds the kernel's `cgroup_mutex`, as whatever changes cgroups does, for as long as a test wants.

An iterator over cgroups (Linux 6.1, d4ccaf58a847) holds it while its program runs. This program
reads memory of the test's that userfaultfd(2) provides only at the end.
"""

import concurrent.futures
import contextlib
import ctypes
import fcntl
import mmap
import os
import select
import struct
import threading
from collections.abc import Iterator

import pytest

from agent.linux.cgroups import cgroup2_mount
from bpf import btf, syscalls
from tests.kernel.offers import NOT_OFFERED
from tests.polling import PATIENCE_SECONDS

_USERFAULTFD = "/dev/userfaultfd"
_FUNCTION = "bpf_iter_cgroup"
_TRACING, _TRACE_ITER, _SLEEPABLE = 26, 28, 1 << 4
_ONLY_ITSELF = 1  # BPF_CGROUP_ITER_SELF_ONLY
_COPY_FROM_USER = 148  # bpf_copy_from_user, Linux 5.10
_INSTRUCTION = struct.Struct("=BBhi")
# linux/userfaultfd.h
_NEW, _API, _REGISTER = 0xAA00, 0xC018AA3F, 0xC020AA00
_VERSION, _MISSING = 0xAA, 1


@contextlib.contextmanager
def held() -> Iterator[None]:
    """What attaches, reads or detaches a cgroup's program meanwhile waits until the end, and so
    does each process of the machine that moves to another cgroup: start before what the test needs.
    Fails after `PATIENCE_SECONDS`."""
    if not os.path.exists(_USERFAULTFD):
        pytest.skip(f"{NOT_OFFERED}{_USERFAULTFD} (Linux 6.1)")
    with contextlib.closing(mmap.mmap(-1, mmap.PAGESIZE)) as page:
        # The export of its address ends at once, or the page could not be closed.
        address = ctypes.addressof(ctypes.c_char.from_buffer(page))
        iteration = _iteration(address)
        try:
            faults = contextlib.ExitStack()
            opened = _faults(address)
            faults.callback(os.close, opened)
            limit = threading.Timer(PATIENCE_SECONDS, faults.close)
            with faults, concurrent.futures.ThreadPoolExecutor(1) as threads:
                read = threads.submit(os.read, iteration, mmap.PAGESIZE)
                limit.start()
                try:
                    assert _is_readable(opened), "the iterator's program does not run"
                    yield
                    assert limit.is_alive(), "the test waited for what the mutex holds up"
                finally:
                    limit.cancel()
                    faults.close()
                    read.result(PATIENCE_SECONDS)
                    limit.join()
        finally:
            os.close(iteration)


def _faults(address: int) -> int:
    """A descriptor that is readable once something waits for this page, until it is closed."""
    device = os.open(_USERFAULTFD, os.O_RDWR | os.O_CLOEXEC)
    try:
        faults = fcntl.ioctl(device, _NEW, os.O_CLOEXEC | os.O_NONBLOCK)
    finally:
        os.close(device)
    fcntl.ioctl(faults, _API, struct.pack("=QQQ", _VERSION, 0, 0))
    fcntl.ioctl(faults, _REGISTER, struct.pack("=QQQQ", address, mmap.PAGESIZE, _MISSING, 0))
    return faults


def _is_readable(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(PATIENCE_SECONDS * 1000))


def _iteration(address: int) -> int:
    """A descriptor; what reads it holds the mutex until it has read 8 bytes from this address."""
    mount = cgroup2_mount()
    assert mount is not None
    program, cgroup = _load(address), os.open(mount, os.O_RDONLY | os.O_DIRECTORY)
    which = ctypes.create_string_buffer(struct.pack("=IIQ", _ONLY_ITSELF, cgroup, 0), 16)
    link = -1
    try:
        attributes = struct.pack("=IIIIQI", program, 0, _TRACE_ITER, 0, ctypes.addressof(which), 16)
        link, _ = syscalls.call(
            syscalls.Command.LINK_CREATE, attributes, what="making an iterator over cgroups"
        )
        return syscalls.iterator_open(link)
    finally:
        for fd in (program, cgroup, link):
            if fd >= 0:
                os.close(fd)


def _load(address: int) -> int:
    low, high = struct.unpack("=ii", struct.pack("=Q", address))
    instructions = [
        (0xBF, 1 | 10 << 4, 0, 0),  # r1 = r10
        (0x07, 1, 0, -8),  # r1 -= 8
        (0xB7, 2, 0, 8),  # r2 = 8
        (0x18, 3, 0, low),  # r3 = address
        (0, 0, 0, high),
        (0x85, 0, 0, _COPY_FROM_USER),
        (0xB7, 0, 0, 0),
        (0x95, 0, 0, 0),
    ]
    code = b"".join(_INSTRUCTION.pack(*each) for each in instructions)
    held_code = ctypes.create_string_buffer(code, len(code))
    licence = ctypes.create_string_buffer(b"GPL")
    attributes = struct.pack(
        "=IIQQIIQII16sIIIIQIIQII",
        *(_TRACING, len(instructions)),
        *(ctypes.addressof(held_code), ctypes.addressof(licence)),
        *(0, 0, 0, 0, _SLEEPABLE, b"hold_cgroups", 0, _TRACE_ITER),
        *(0, 0, 0, 0, 0, 0, 0, btf.function_id(_FUNCTION)),
    )
    what = "loading an iterator over cgroups"
    return syscalls.call(syscalls.Command.PROG_LOAD, attributes, what=what)[0]
