"""Answers without rights on nodes: by kubectl's proxy first, and by exec where that fails."""

import contextlib
import json
import pathlib
import sys
from typing import Any

import pytest

from agent.operate.kubectl import main
from agent.operate.kubectl.agent_pods import AgentPod
from agent.operate.kubectl.cluster import Cluster, KubectlError
from agent.operate.kubectl.reading import Reader
from tests import polling
from tests.agent.operate.kubectl import proxy_standin, reporting
from tests.agent.operate.kubectl.standin import KubectlStandin, agent_pod

DROPS = json.dumps({"sources": [], "lostPackets": 0})
FORBIDDEN = "Error from server (Forbidden): pods is forbidden"
AGENT = "/api/v1/namespaces/podgate/pods/https:agent-a:9652/proxy/read"


def token_path(namespace: str) -> str:
    return f"POST /api/v1/namespaces/{namespace}/serviceaccounts/podgate-view/token"


class Proxied:
    """The stand-in for kubectl, with one for its proxy; the agent of node a serves answers."""

    def __init__(self, kubectl: KubectlStandin, folder: pathlib.Path) -> None:
        self.kubectl = kubectl
        self._folder = folder
        self._answers: dict[str, tuple[int, str]] = {}
        self.command = str(folder / "proxied")
        script = folder / "proxied"
        script.write_text(
            '#!/bin/sh\nfor word; do\nif [ "$word" = proxy ]; then\n'
            f'exec {sys.executable} {proxy_standin.__file__} {folder} "$@"\nfi\ndone\n'
            f'exec {kubectl.command} "$@"\n',
            encoding="utf-8",
        )
        script.chmod(0o755)
        kubectl.serve_nodes("a")
        pod = agent_pod("a")
        arguments = ["run", "--metrics-address=$(HOST_IP):9652"]
        pod["spec"]["containers"] = [{"name": "agent", "args": arguments}]
        kubectl.respond("get", "pods", "--namespace=podgate", output={"items": [pod]})
        kubectl.respond("exec", error=FORBIDDEN)
        self.answer("GET /", 404, "")

    def answer(self, request: str, status: int, body: str) -> None:
        self._answers[request] = (status, body)
        (self._folder / "answers.json").write_text(json.dumps(self._answers), encoding="utf-8")

    def give_token(self, namespace: str = "podgate") -> None:
        self.answer(
            token_path(namespace), 201, json.dumps({"status": {"token": f"of-{namespace}"}})
        )

    def deny_token(self, namespace: str = "podgate") -> None:
        text = f"serviceaccounts in {namespace} is forbidden"
        self.answer(token_path(namespace), 403, json.dumps({"kind": "Status", "message": text}))

    def requests(self) -> list[Any]:
        path = self._folder / "requests"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        return [json.loads(line) for line in lines]

    def run(self, *arguments: str) -> int:
        return main.main(["--kubectl", self.command, "--timeout=300", *arguments])


@pytest.fixture
def proxied(kubectl: KubectlStandin, tmp_path: pathlib.Path) -> Proxied:
    return Proxied(kubectl, tmp_path)


def test_answer_is_read_with_a_token_for_agents_alone(
    proxied: Proxied, capsys: pytest.CaptureFixture[str]
) -> None:
    proxied.give_token()
    proxied.answer(f"GET {AGENT}/drops", 200, DROPS)
    assert proxied.run("drops") == 0
    assert "No host process has opened" in capsys.readouterr().out
    assert proxied.kubectl.calls("exec") == []
    made, read = proxied.requests()
    assert json.loads(made[3])["spec"] == {
        "audiences": ["podgate.io/agent"],
        "expirationSeconds": 600,
    }
    assert read[1] == f"{AGENT}/drops"
    assert read[2]["X-Podgate-Token"] == "of-podgate"


def test_status_is_read_without_exec(proxied: Proxied, capsys: pytest.CaptureFixture[str]) -> None:
    proxied.give_token()
    proxied.answer(f"GET {AGENT}/status", 200, json.dumps(reporting.report()))
    assert proxied.run("status") == 0
    assert "1 node: 1 in order." in capsys.readouterr().out
    assert proxied.kubectl.calls("exec") == []


@pytest.mark.parametrize(
    ("status", "body", "text"),
    [
        (403, {"message": "It is forbidden."}, "Error from server (Forbidden): It is forbidden."),
        (404, {"message": "No such path."}, "Error from server: No such path."),
        (503, "no endpoints\nof it\n", "Error from server: no endpoints"),
        (500, [], "Error from server: []"),
        (502, "", "Error from server: HTTP status 502"),
        (502, {"message": ""}, "Error from server: HTTP status 502"),
    ],
)
def test_response_that_is_an_error_has_the_words_of_the_server(
    proxied: Proxied, status: int, body: object, text: str
) -> None:
    proxied.give_token()
    written = body if isinstance(body, str) else json.dumps(body)
    proxied.answer(f"GET {AGENT}/status", status, written)
    cluster = Cluster([proxied.command], timeout_seconds=300)
    with contextlib.closing(Reader(cluster)) as reader, pytest.raises(KubectlError) as refused:
        reader.get(AgentPod("agent-a", "a", read_port=9652), "status")
    assert str(refused.value) == text


def test_agent_without_a_port_for_readers_is_not_read(cluster: Cluster) -> None:
    with pytest.raises(KubectlError, match=r"serves no answers over the network \(metrics\.port\)"):
        Reader(cluster).get(AgentPod("agent-a", "a"), "status")


def test_proxy_that_does_not_start_is_named_with_its_reason(
    kubectl: KubectlStandin, cluster: Cluster
) -> None:
    agent = AgentPod("agent-a", "a", read_port=9652)
    with contextlib.closing(Reader(cluster)) as reader:
        for _ in range(2):
            with pytest.raises(KubectlError, match="kubectl proxy: error: no response for proxy "):
                reader.get(agent, "status")
    # What keeps it from reading is found once.
    assert len(kubectl.calls("proxy")) == 1
    silent = Cluster(["sh", "-c", "exec sleep 60"], timeout_seconds=0.05)
    with (
        contextlib.closing(Reader(silent)) as reader,
        pytest.raises(KubectlError, match=r"^kubectl proxy: no response in time$"),
    ):
        reader.get(agent, "status")


def test_proxy_that_ends_without_a_word_is_not_waited_for(kubectl: KubectlStandin) -> None:
    kubectl.respond("proxy")
    patient = Cluster([kubectl.command], timeout_seconds=300)
    with (
        contextlib.closing(Reader(patient)) as reader,
        pytest.raises(KubectlError, match=r"^kubectl proxy: it has ended$"),
    ):
        reader.get(AgentPod("agent-a", "a", read_port=9652), "status")


def test_account_of_the_namespace_reads_its_pods(
    proxied: Proxied, capsys: pytest.CaptureFixture[str]
) -> None:
    proxied.deny_token()
    proxied.give_token("shop")
    proxied.answer(f"GET {AGENT}/drops", 200, DROPS)
    assert proxied.run("drops", "-n", "shop") == 0
    *_, read = proxied.requests()
    assert read[1] == f"{AGENT}/drops?namespace=shop"
    assert read[2]["X-Podgate-Token"] == "of-shop"


def test_nothing_that_may_be_read_is_no_all_clear(
    proxied: Proxied, capsys: pytest.CaptureFixture[str]
) -> None:
    proxied.deny_token()
    proxied.deny_token("shop")
    assert proxied.run("drops", "-n", "shop") == 3
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "serviceaccounts in shop is forbidden; nor by exec: Error" in shown.err
    before = len(proxied.requests())
    assert proxied.run("drops") == 3
    assert "serviceaccounts in podgate is forbidden; nor by exec" in capsys.readouterr().err
    # There is no other account to try.
    assert len(proxied.requests()) == before + 1


def test_agent_without_these_answers_is_read_by_exec(
    proxied: Proxied, capsys: pytest.CaptureFixture[str]
) -> None:
    proxied.give_token()
    proxied.kubectl.respond("exec", "agent-a", "drops", output=DROPS)
    assert proxied.run("drops") == 0
    assert "No host process has opened" in capsys.readouterr().out


def test_namespace_without_the_right_to_find_agents_is_read_from_events(
    proxied: Proxied, capsys: pytest.CaptureFixture[str]
) -> None:
    proxied.kubectl.respond("get", "pods", "--namespace=podgate", error=FORBIDDEN)
    event = {
        "metadata": {"creationTimestamp": "2026-11-22T10:00:00Z"},
        "reason": "TrafficDropped",
        "message": "Mode enforce: dropped 3 packets.",
        "involvedObject": {"name": "web"},
    }
    others = {**event, "reason": "Unhealthy", "message": "Readiness probe failed"}
    proxied.kubectl.respond("get", "events", "--namespace=shop", output={"items": [event, others]})
    assert proxied.run("drops", "-n", "shop") == 3
    shown = capsys.readouterr()
    assert shown.out == "2026-11-22T10:00:00Z  shop/web: Mode enforce: dropped 3 packets.\n"
    assert "none of them does not mean that nothing was dropped" in shown.err
    # Without a namespace there is nothing to read.
    assert proxied.run("drops") == 1


def test_proxy_ends_with_the_reader(proxied: Proxied) -> None:
    proxied.give_token()
    proxied.answer(f"GET {AGENT}/status", 200, "{}")
    cluster = Cluster([proxied.command], timeout_seconds=300)
    agent = AgentPod("agent-a", "a", read_port=9652)
    with contextlib.closing(Reader(cluster)) as reader:
        assert reader.get(agent, "status") == "{}"
        (socket,) = pathlib.Path(reader._socket).parent.iterdir()
        assert socket.parent.stat().st_mode & 0o777 == 0o700
    polling.wait_until("the socket's directory is gone", lambda: not socket.parent.exists())
    with pytest.raises(KubectlError, match="no response by kubectl proxy"):
        reader.get(agent, "status")
