"""A pod demands a client certificate, podgate shows one, and the kubelet's plain probe is answered.

Without a usable certificate podgate has no verdict: the probe reaches the pod, and no healthy pod
restarts for what podgate lacks.
"""

import datetime
import functools
import json
import pathlib
import shutil
from collections.abc import Iterator

import pytest

from agent.admin import finding_kinds as kinds
from agent.admin.report import AgentReport
from agent.lab.agent_process import Launch
from agent.logs import Event
from bpf import pins
from tests.conftest import fresh_lab
from tests.kernel import answered, offers
from tests.kernel.answered import CHECKED, FAST, HEALTHY, PROXIED, SICK
from tests.kernel.strictnode import Node, strict_node
from tests.probes.authorities import Authority

pytestmark = pytest.mark.kernel

CHECK = {
    **FAST,
    "http": {
        "port": CHECKED,
        "scheme": "HTTPS",
        "tls": {"clientCertificate": {"file": "queue"}},
    },
}


@pytest.fixture
def certificates(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "certificates"


@pytest.fixture
def node(
    launch: Launch, installed: pins.Pins, tmp_path: pathlib.Path, certificates: pathlib.Path
) -> Iterator[Node]:
    offers.need_netns_cookie()
    (tmp_path / "strict").mkdir()
    with fresh_lab() as lab, strict_node(lab, tmp_path / "strict", launch, installed) as made:
        answered.add(made, "queue", 1, [(answered.http_probe(), CHECK)])
        made.start("--probe-certificates-dir", str(certificates))
        yield made


def replace(where: pathlib.Path, version: str, pair: tuple[bytes, bytes]) -> None:
    """As CSI drivers do: a link to another directory replaces the one before."""
    (where / version).mkdir(parents=True)
    for name, content in zip(("tls.crt", "tls.key"), pair, strict=True):
        (where / version / name).write_bytes(content)
        if not (where / name).is_symlink():
            (where / name).symlink_to(f"..data/{name}")
    (where / "..new").symlink_to(version)
    (where / "..new").rename(where / "..data")


def sentences(report: AgentReport) -> list[str]:
    return [one.sentence for one in report.findings if one.kind == kinds.PROBE_CERTIFICATE.name]


def is_reported(why: str, report: AgentReport) -> bool:
    return any(why in sentence for sentence in sentences(report))


def test_answer_follows_the_pod_and_never_the_lack_of_a_certificate(
    node: Node, certificates: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    authority = Authority()
    pod, where = node.pods["queue"].pod, certificates / "demo" / "queue"
    demands = authority.demanding(tmp_path)
    good = authority.issue()
    with answered.serving(pod, tls=demands) as server, answered.kubelet(node, pod) as kubelet:
        report = node.operator.wait_for("the finding", lambda found: bool(sentences(found)))
        assert "cannot be opened" in sentences(report)[0]
        assert kubelet.results_after(0) == {PROXIED}

        replace(where, "..1", good)
        assert set(kubelet.until(HEALTHY)) <= {PROXIED, HEALTHY}
        node.operator.wait_for("no finding", lambda found: not sentences(found))
        server.is_healthy = False
        assert set(kubelet.until(SICK)) <= {PROXIED, HEALTHY, SICK}
        server.is_healthy = True
        kubelet.until(HEALTHY)

        second = datetime.timedelta(seconds=1)
        for number, (useless, why) in enumerate(
            (
                (authority.issue(ends=-second), "expired"),
                (Authority("another").issue(), "the pod rejects podgate's client certificate"),
                ((good[0], authority.issue()[1]), "not the key"),
            )
        ):
            replace(where, f"..{number}bad", useless)
            node.operator.wait_for(why, functools.partial(is_reported, why))
            assert set(kubelet.until(PROXIED)) <= {PROXIED, HEALTHY}
            replace(where, f"..{number}good", authority.issue())
            assert set(kubelet.until(HEALTHY)) <= {PROXIED, HEALTHY}
        shutil.rmtree(where)
        assert set(kubelet.until(PROXIED)) <= {PROXIED, HEALTHY}
    assert node.operator.event(Event.PROBE_CERTIFICATE_UNUSABLE, certificate="demo/queue")
    secret = good[1].decode().splitlines()[1]
    state = (node.operator.run_directory / "state" / "probes.json").read_text(encoding="utf-8")
    assert secret not in state
    assert secret not in json.dumps(list(node.operator.log_lines()))
