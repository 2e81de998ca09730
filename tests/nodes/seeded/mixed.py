"""Tests of both kinds in one file, for tests/nodes/test_units.py; not collected."""

import os
from collections.abc import Iterator

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


def test_last_unit(made_by: int) -> None:
    assert made_by == os.getpid()
