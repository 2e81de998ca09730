"""What a test leaves is reported as that test's, by name; and no other test sees it."""

import re

import pytest

from tests.nodes import nested
from tests.nodes.seeded import leaking

pytestmark = pytest.mark.kernel

_LEFT = {
    "descriptor": ["descriptor of /proc/"],
    "socket": ["descriptor of INET socket ('127.0.0.1', 4711)"],
    "link": ["link seeded0", "link seeded1"],
    "network_namespace": ["network namespace /run/netns/seeded"],
    "pin": ["pin /run/podgate-lab/bpf/seeded/map"],
    "cgroup": ["cgroup seeded"],
    "nftables_table": ["nftables table seeded"],
    "process": ["process sleep 4711"],
}


@pytest.fixture(scope="module")
def reports() -> dict[str, str]:
    """By test, the sentence of its error."""
    output = nested.run(leaking)
    error = r"ERROR at teardown of (\S+) (?:.|\n)*?\nE +AssertionError: (.*)"
    return dict(re.findall(error, output)) | {"summary": output}


@pytest.mark.parametrize("where", ["TestOnSharedNode", "TestOnOwnNode"])
@pytest.mark.parametrize("kind", _LEFT)
def test_what_a_test_leaves_is_its_error(reports: dict[str, str], where: str, kind: str) -> None:
    sentence = reports[f"{where}.test_{kind}"]
    assert sentence.startswith("the test left on its node: ")
    for left in _LEFT[kind]:
        assert left in sentence


def test_tests_that_leave_nothing_pass(reports: dict[str, str]) -> None:
    tests = len(_LEFT) + 1
    assert re.search(rf"{2 * tests} passed, {2 * len(_LEFT)} errors", reports["summary"])
