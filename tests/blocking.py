"""Fails unit tests in which something of the product blocks the event loop.

blockbuster finds calls of the standard library that may block (sleep, files, blocking sockets,
locks) while a loop runs in the same thread, below any frame of `agent`, `bpf` or `probes`. What a
test itself does between two of them, such as writing a file, is not the product's.
"""

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from types import CodeType
from typing import TypeVar

import blockbuster.blockbuster as blockbuster
import pytest

_PRODUCT = ("agent", "bpf", "probes")
_of_tests: list[CodeType] = []

F = TypeVar("F", bound=Callable[..., object])


def may_block(reason: str) -> Callable[[F], F]:
    """Lets a helper of tests block the loop, with all that it calls."""
    assert reason

    def allow(function: F) -> F:
        _of_tests.append(function.__code__)
        _watcher.cache_clear()
        return function

    return allow


@contextlib.contextmanager
def forbidden() -> Iterator[None]:
    """Raise in whatever blocks, and again at the end: an `except Exception` may hide the first."""
    found: list[str] = []

    class Recorded(blockbuster.BlockingError):
        def __init__(self, function: str) -> None:
            super().__init__(function)
            found.append(f"{function}, called by {_call_sites()}")

    watcher = _watcher()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blockbuster, "BlockingError", Recorded)
        watcher.activate()
        try:
            yield
        finally:
            watcher.deactivate()
    assert not found, f"blocked the event loop: {found}"


@functools.cache
def _watcher() -> blockbuster.BlockBuster:
    """Made once: that takes longer than most tests."""
    names: dict[str, set[str]] = {}
    for code in (*_of_product(), *_of_tests):
        names.setdefault(code.co_filename, set()).add(code.co_name)
    watcher = blockbuster.BlockBuster(_PRODUCT)
    for function in watcher.functions.values():
        for path, allowed in names.items():
            function.can_block_in(path, allowed)
    return watcher


def _of_product() -> Iterator[CodeType]:
    """What may block in the product."""
    from grpc._channel import _ChannelCallState

    from agent.api import listen, peer_credentials
    from agent.app.cluster_outputs import ClusterOutputs
    from agent.client.conditions import ConditionPublisher
    from agent.cni import added
    from agent.cni.publisher import CniStatePublisher
    from agent.cri import client as cri
    from agent.cri import endpoints, sandbox_netns
    from agent.kube import api_pods
    from agent.kube import client as kube
    from agent.lab import polling
    from agent.linux import directories, locks
    from agent.linux.nft_cgroups import CgroupMatches
    from agent.pods.pod_modes import PodModes
    from agent.policy.files import PolicyFiles
    from agent.probing.result_store import ResultStore
    from agent.sources import standalone
    from agent.state_files import StateSaver
    from probes.netns import Netns

    yield from (
        inspect.unwrap(function).__code__
        for function in (
            # grpcio waits for its poller's thread where its last server ends, whose frames in C are
            # not seen; ours joins threads only outside of loops. From Python 3.13 on it has no lock
            # that is seen.
            threading.Thread.join,
            # The same where a synchronous client's channel ends: closed by tests, or collected,
            # which happens below any code.
            ConditionPublisher.close,
            _ChannelCallState.__del__,
            # Call the checks of tests.
            polling.until,
            polling.request_until,
            # Runs in a thread, with a loop of its own for the official client's loader.
            kube._load,
            # At start, before anything else runs: the boot's id and what an earlier agent saved.
            ClusterOutputs.__init__,
            api_pods.ApiPods.restore,
            standalone.StandalonePods.restore,
            CniStatePublisher.open,
            PodModes.restore,
            PolicyFiles.__init__,
            ResultStore.__init__,
            # The last write of an agent that ends; those before it run in threads.
            StateSaver.run,
            # Sockets in the run directory, a tmpfs, when a server starts or ends.
            listen.unix_socket,
            listen.close,
            added._listen,
            listen.add_grpc_socket,
            peer_credentials.PeerCredentialProxy.serve,
            # Locks: two system calls on one directory.
            directories.open_private,
            locks.is_current,
            # Names of sockets, namespaces and cgroups, each in a tmpfs, procfs or cgroupfs.
            cri._unavailable,
            endpoints.open_runtime,
            sandbox_netns.is_of_host,
            Netns.exists,
            Netns.open,
            CgroupMatches.exists,
            CgroupMatches._match,
        )
    )


def _call_sites() -> str:
    """The innermost functions outside of the standard library."""
    frames = [frame for frame in inspect.stack(0) if not frame.filename.endswith("blockbuster.py")]
    names = [f"{frame.filename}:{frame.lineno} {frame.function}" for frame in frames[1:]]
    return " < ".join([name for name in names if any(f"/{p}/" in name for p in _PRODUCT)][:3])
