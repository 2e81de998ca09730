"""The pod of `podgate probe --pod`, as the agent reports it."""

import pathlib

import msgspec
import pytest

from agent.operate.cli.commands import probe_runner
from agent.operate.cli.commands.probe_runner import ProbeCommandError
from probes.netns import Netns
from tests.agent.operate.cli.stub_agent import StubAgent
from tests.agent.operate.page.reports import pod, report

PODS_NETNS = "/run/netns/pod"


@pytest.fixture(autouse=True)
def _namespace_of_a_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that can be opened without root."""
    opened = Netns.open

    def open_netns(path: str) -> Netns:
        return Netns(path, 4, 1000) if path == PODS_NETNS else opened(path)

    monkeypatch.setattr(Netns, "open", staticmethod(open_netns))


async def found(tmp_path: pathlib.Path, name: str) -> tuple[str, ...]:
    """The addresses of this pod on a node."""
    pods = [
        pod("web", netns=PODS_NETNS),
        pod(
            "web",
            namespace="other",
            netns=PODS_NETNS,
            addresses=[],
            unconfirmed={"198.18.1.9": "no route"},
        ),
        pod(
            "db", netns=PODS_NETNS, addresses=["198.18.1.2"], unconfirmed={"198.18.1.3": "no route"}
        ),
        pod("new", netns=None),
        pod("gone", netns=str(tmp_path / "gone")),
    ]
    status = msgspec.json.encode(report(*pods))
    with StubAgent(tmp_path, {"/version": b"1.2.3", "/status": status}):
        return (await probe_runner.find_pod(name, tmp_path)).addresses


async def test_pod_is_found_by_its_name_alone_or_with_its_namespace(
    tmp_path: pathlib.Path,
) -> None:
    assert await found(tmp_path / "a", "db") == ("198.18.1.2",)
    assert await found(tmp_path / "b", "shop/web") == ("198.18.1.1",)


async def test_unconfirmed_addresses_are_probed_where_no_address_is_confirmed(
    tmp_path: pathlib.Path,
) -> None:
    assert await found(tmp_path, "other/web") == ("198.18.1.9",)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("shop/none", "the agent has no pod shop/none; 'podgate status' lists its pods."),
        ("web", "several pods are named web; use one of shop/web, other/web."),
        ("new", "pod new has no network namespace."),
        ("gone", "gone"),
    ],
)
async def test_pod_that_cannot_be_probed_is_one_sentence(
    tmp_path: pathlib.Path, name: str, problem: str
) -> None:
    with pytest.raises(ProbeCommandError, match=problem.replace("(", r"\(")):
        await found(tmp_path, name)
