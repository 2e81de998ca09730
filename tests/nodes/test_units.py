"""Which tests share a node, and what ends with one."""

import re

import pytest

from tests.nodes import nested
from tests.nodes.seeded import consecutive, mixed, separate

pytestmark = pytest.mark.kernel


@pytest.fixture(scope="module")
def output() -> str:
    return nested.run(separate)


@pytest.fixture(scope="module")
def nodes(output: str) -> dict[str, str]:
    """The node of each test that shows it."""
    shown = re.findall(r"_+ (test_\w+) _+\n-+ Captured stdout call -+\nNODE (.*)\n", output)
    return dict(shown)


def test_tests_of_a_file_share_a_node(nodes: dict[str, str]) -> None:
    assert nodes["test_first_of_the_file"] == nodes["test_second_of_the_file"]


def test_test_with_its_own_node_shares_it_with_no_other(nodes: dict[str, str]) -> None:
    own = [node for name, node in nodes.items() if "own_node" in name]
    assert len(own) == 2
    assert all(list(nodes.values()).count(node) == 1 for node in own)


def test_end_of_its_process_is_the_failure_of_a_test(output: str, nodes: dict[str, str]) -> None:
    assert re.search(
        r"test_that_kills_its_process.*\nthe process of this test ended by SIGKILL", output
    )
    assert nodes["test_after_a_killed_process"] not in (nodes["test_first_of_the_file"], "")


def test_time_limit_is_the_failure_of_a_test(output: str, nodes: dict[str, str]) -> None:
    assert "FAILED tests/nodes/seeded/separate.py::test_that_hangs - Failed: Timeout" in output
    assert nodes["test_after_one_that_hung"] == nodes["test_after_a_killed_process"]


def test_each_other_test_passes(output: str) -> None:
    # The third error is a descriptor that test_own_node leaves.
    assert re.search(r"2 failed, 6 passed, 1 error", output)


def test_tests_of_both_kinds_run_beside_each_other() -> None:
    """As a run of a directory without `-m` has them."""
    assert "9 passed" in nested.run(mixed, status=0)


def test_process_continues_on_a_new_node_only_if_it_is_as_before() -> None:
    """Two pairs in eight tests."""
    output = nested.run(consecutive)
    shown = dict(
        re.findall(r"_+ (test_\w+) _+\n-+ Captured stdout call -+\nPROCESS (.*)\n", output)
    )
    processes, nodes, networks, directories = zip(
        *(line.split() for line in shown.values()), strict=True
    )
    # Of the test that fails, the output is elsewhere.
    first, second, *others, after_a_failure, last = processes
    assert (first, after_a_failure) == (second, last)
    assert len({first, *others, last}) == len(others) + 2 == 5
    assert len({*nodes}) == len({*networks}) == 7
    assert len({*directories}) == 1
