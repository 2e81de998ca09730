"""Tests of both kinds in one file, for tests/nodes/test_units.py; not collected."""

import os
from collections.abc import Iterator
from concurrent import futures

import grpc
import pytest


@pytest.fixture(scope="module")
def made_by() -> Iterator[int]:
    """The process that has made it, and that ends it."""
    made = os.getpid()
    yield made
    assert os.getpid() == made


class TestFirst:
    def test_unit(self, made_by: int) -> None:
        assert made_by == os.getpid()

    @pytest.mark.kernel
    def test_kernel(self, made_by: int) -> None:
        assert made_by == os.getpid()

    def test_another_unit(self, made_by: int) -> None:
        assert made_by == os.getpid()


@pytest.mark.kernel
def test_kernel_between(made_by: int) -> None:
    assert made_by == os.getpid()


class TestSecond:
    def test_unit(self, made_by: int) -> None:
        assert made_by == os.getpid()

    @pytest.mark.kernel
    def test_own_node(self, own_node: None, made_by: int) -> None:
        assert made_by == os.getpid()


_running: list[grpc.Server] = []


def call_a_server() -> grpc.Server:
    """A server that has answered."""
    server = grpc.server(futures.ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    target = f"127.0.0.1:{port}"
    with grpc.insecure_channel(target) as channel, pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary("/a/b")(b"", timeout=10)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    return server


def test_grpc_that_runs_on() -> None:
    _running.append(call_a_server())


@pytest.mark.kernel
def test_grpc_on_a_node_of_its_own(own_node: None) -> None:
    call_a_server().stop(None).wait()


def test_last_unit(made_by: int) -> None:
    assert made_by == os.getpid()
