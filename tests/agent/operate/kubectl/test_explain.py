"""`kubectl podgate explain`: the answer of the agent's own command."""

import json

import pytest

from agent.operate.kubectl import main
from tests.agent.operate.kubectl.standin import KubectlStandin

ENDED = "command terminated with exit code 1\n"
FLOW = ("explain", "--from", "unit:backup.service", "--to", "shop/web", "--port", "8080")


@pytest.fixture
def nodes(kubectl: KubectlStandin) -> KubectlStandin:
    """A pod shop/web on node b."""
    kubectl.serve_nodes("a", "b")
    pod = {"metadata": {"namespace": "shop", "name": "web"}, "spec": {"nodeName": "b"}}
    kubectl.respond("get", "pod", "web", output=pod)
    return kubectl


def run(kubectl: KubectlStandin, *arguments: str) -> int:
    return main.main(["--kubectl", kubectl.command, *arguments])


def test_flow_is_explained_by_the_agent_of_the_pods_node(
    nodes: KubectlStandin, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes.respond("exec", "agent-b", "explain", output={"verdict": "pass"})
    assert run(nodes, *FLOW, "-o", "json", "--protocol", "tcp") == 0
    assert json.loads(capsys.readouterr().out) == {"verdict": "pass"}
    ((arguments, _),) = nodes.calls("exec")
    assert arguments[arguments.index("--") + 1 :] == [
        *("podgate", "explain", "--output=json", "--from=unit:backup.service", "--to=shop/web"),
        *("--port=8080", "--protocol=tcp"),
    ]


@pytest.mark.parametrize(
    "named", [("--from", "unit:a.service", "--node", "b"), ("--from", "pod:shop/web")]
)
def test_flow_to_an_address_is_explained_by_the_node_of_its_source(
    nodes: KubectlStandin, named: tuple[str, ...]
) -> None:
    nodes.respond("exec", "agent-b", "explain", output={"verdict": "drop"}, error=ENDED)
    assert run(nodes, "explain", *named, "--to", "169.254.169.254", "--port", "80") == 1
    ((arguments, _),) = nodes.calls("exec")
    assert "--to=169.254.169.254" in arguments


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--from", "unit:a.service", "--to", "::1", "--port", "80"), "needs --node, or pod:"),
        ((*FLOW[1:], "--node", "a"), "--node is for an address in --to"),
    ],
)
def test_node_is_named_for_an_address_alone(
    nodes: KubectlStandin,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    sentence: str,
) -> None:
    assert run(nodes, "explain", *arguments) == 1
    assert sentence in capsys.readouterr().err
    assert not nodes.calls("exec")


def test_dropped_flow_is_an_answer_with_exit_status_1(
    nodes: KubectlStandin, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes.respond("exec", "agent-b", "explain", output="dropped\n", error=ENDED)
    assert run(nodes, *FLOW) == 1
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("dropped\n", "")


def test_node_without_an_agent_has_its_own_exit_status(
    nodes: KubectlStandin, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes.serve_nodes("a", "b", without_agent=["b"])
    assert run(nodes, *FLOW) == 3
    assert capsys.readouterr().err == "kubectl podgate: b: no agent runs on this node\n"


def test_pod_without_a_node_is_one_sentence(
    nodes: KubectlStandin, capsys: pytest.CaptureFixture[str]
) -> None:
    pod = {"metadata": {"namespace": "shop", "name": "web"}, "spec": {}}
    nodes.respond("get", "pod", "web", output=pod)
    assert run(nodes, *FLOW) == 1
    assert "pod shop/web has no node yet" in capsys.readouterr().err


def test_two_namespaces_of_one_pod_are_rejected(
    nodes: KubectlStandin, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(nodes, *FLOW, "-n", "other") == 1
    assert "shop/web is in namespace shop, and not in other" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--from", "--to", "--port"])
def test_flow_needs_a_source_a_pod_and_a_port(
    nodes: KubectlStandin, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    arguments = [*FLOW]
    start = arguments.index(option)
    del arguments[start : start + 2]
    with pytest.raises(SystemExit) as ended:
        run(nodes, *arguments)
    assert ended.value.code == 2
    assert f"required: {option}" in capsys.readouterr().err


@pytest.mark.parametrize("port", ["-1", "65536"])
def test_port_is_one_of_the_protocols(
    nodes: KubectlStandin, capsys: pytest.CaptureFixture[str], port: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(nodes, *FLOW[:-1], port)
    assert ended.value.code == 2
    assert "0 to 65535" in capsys.readouterr().err
    assert not nodes.calls("exec")


def test_pod_has_the_namespace_of_its_name_or_option(nodes: KubectlStandin) -> None:
    nodes.respond("exec", "agent-b", "explain", output="pass\n")
    for arguments in (
        FLOW,
        (*FLOW[:4], "web", "--port", "8080", "-n", "shop"),
        (*FLOW, "-n", "shop"),
    ):
        assert run(nodes, *arguments) == 0
    assert run(nodes, *FLOW[:4], "web", "--port", "8080") == 0
    found = [call for call, _ in nodes.calls("get", "pod", "web")]
    options = ["--output=json", "--request-timeout=10s"]
    assert found == [
        *[["get", "pod", "web", "--namespace=shop", *options]] * 3,
        ["get", "pod", "web", *options],
    ]


@pytest.mark.parametrize("port", ["0", "65535"])
def test_first_and_last_port_are_ports(nodes: KubectlStandin, port: str) -> None:
    nodes.respond("exec", "agent-b", "explain", output="pass\n")
    assert run(nodes, *FLOW[:-1], port) == 0
    assert nodes.calls("exec", f"--port={port}", "--output=table")
