"""`kubectl podgate drops`: sources of all nodes in one list, and their events in one stream."""

import datetime
import json
import pathlib
from collections.abc import Generator, Sequence
from typing import Any

import msgspec
import pytest
import yaml

from agent.admin.report import DropEventStatus, Drops, SourceProcessStatus
from agent.operate.kubectl import drop_stream, drops, main
from agent.operate.kubectl.cluster import Cluster
from agent.operate.kubectl.drop_stream import NodeLine
from tests import polling
from tests.agent.operate.kubectl.reporting import AT, encoded
from tests.agent.operate.kubectl.standin import KubectlStandin, agent_pod


def source(
    pod: str,
    packets: int,
    minutes: float = 1.0,
    *,
    namespace: str = "shop",
    mode: str = "enforce",
    **fields: Any,
) -> SourceProcessStatus:
    """minutes: since its last packet."""
    made = SourceProcessStatus(
        namespace=namespace,
        pod=pod,
        mode=mode,
        verdict="would-drop" if mode == "audit" else "drop",
        protocol="tcp",
        port=8080,
        cgroup="/system.slice/backup.service",
        process="curl",
        packets=packets,
        first=AT - datetime.timedelta(hours=5),
        last=AT - datetime.timedelta(minutes=minutes),
    )
    return msgspec.structs.replace(made, **fields)


@pytest.fixture
def nodes(kubectl: KubectlStandin, monkeypatch: pytest.MonkeyPatch) -> KubectlStandin:
    """Two nodes with sources; a's and b's in turn when sorted by packets."""
    kubectl.serve_nodes("a", "b")
    for node, sources in (
        ("a", [source("web", 9), source("db", 3, 90)]),
        ("b", [source("web", 7, 3, namespace="other", mode="audit")]),
    ):
        kubectl.respond(
            "exec", f"agent-{node}", "drops", output=encoded(Drops(sources=sources, lost_packets=2))
        )
    return kubectl


def run(kubectl: KubectlStandin, *arguments: str) -> int:
    parsed = main.parser().parse_args(["drops", *arguments])
    return drops.run(parsed, Cluster([kubectl.command]), now=lambda: AT)


def test_sources_of_all_nodes_are_one_list_the_busiest_first(
    nodes: KubectlStandin, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(nodes) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "NODE POD TO VERDICT PACKETS LAST SOURCE",
        "a shop/web tcp 8080 drop 9 60s ago curl in unit backup.service",
        "b other/web tcp 8080 would-drop 7 3m ago curl in unit backup.service",
        "a shop/db tcp 8080 drop 3 90m ago curl in unit backup.service",
        "4 packets of further sources are not listed: kernels had no memory.",
    ]


def listed(kubectl: KubectlStandin, capsys: pytest.CaptureFixture[str], *rows: object) -> list[str]:
    """The lines of one node with these sources, without their heads."""
    kubectl.serve_nodes("a")
    drops_of_node = Drops(sources=list(rows), lost_packets=0)  # type: ignore[arg-type]
    kubectl.respond("exec", "agent-a", "drops", output=encoded(drops_of_node))
    assert run(kubectl) == 0
    return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()[1:]]


def test_source_that_a_rule_admits_by_now_is_marked(
    kubectl: KubectlStandin, capsys: pytest.CaptureFixture[str]
) -> None:
    assert listed(kubectl, capsys, source("web", 9, is_admitted=True), source("db", 3)) == [
        "a shop/web tcp 8080 drop 9 60s ago admitted curl in unit backup.service",
        "a shop/db tcp 8080 drop 3 60s ago curl in unit backup.service",
    ]


def test_source_of_a_version_with_fewer_fields_is_listed(
    kubectl: KubectlStandin, capsys: pytest.CaptureFixture[str]
) -> None:
    kubectl.serve_nodes("a")
    row = {"namespace": "shop", "pod": "web", "verdict": "drop", "packets": 9, "port": 80}
    kubectl.respond("exec", "agent-a", "drops", output={"sources": [row], "lostPackets": 0})
    assert run(kubectl) == 0
    head, line = capsys.readouterr().out.splitlines()
    assert head.split() == ["NODE", "POD", "TO", "VERDICT", "PACKETS", "LAST", "SOURCE"]
    assert " ".join(line.split()) == "a shop/web 80 drop 9 20454d ago unknown"
    assert run(kubectl, "-o", "json") == 0
    assert json.loads(capsys.readouterr().out)["sources"] == [
        {
            **{"node": "a", "mode": "", "protocol": "", "cgroup": "", "process": ""},
            **{"sourcePod": "", "portCount": 0, "lowestPort": 0, "highestPort": 0},
            **{"hasManyPorts": False, "isAdmitted": False},
            **dict.fromkeys(("first", "last"), "1970-01-01T00:00:00Z"),
            **row,
        }
    ]


def test_wide_list_has_the_mode_and_times_of_each_source(
    nodes: KubectlStandin, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(nodes, "-o", "wide", "--top", "1", "-n", "shop") == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "NODE POD TO VERDICT PACKETS LAST MODE FIRST (UTC) LAST (UTC) SOURCE",
        "a shop/web tcp 8080 drop 9 60s ago enforce 2026-01-01 07:00:00 2026-01-01 11:59:00 curl "
        "in unit backup.service",
        "1 further sources are left out (--top).",
        "4 packets of further sources are not listed: kernels had no memory.",
    ]


def test_order_is_by_the_chosen_column(
    kubectl: KubectlStandin, capsys: pytest.CaptureFixture[str]
) -> None:
    kubectl.serve_nodes("b", "a")
    for node in ("a", "b"):
        sources = [
            source("web", 5, 2, process="z", cgroup="/x"),
            source("db", 5, 3, namespace="x", process="a", cgroup="/x"),
            source("db", 5, 4, process="b", cgroup="/a"),
        ]
        kubectl.respond(
            "exec", f"agent-{node}", output=encoded(Drops(sources=sources, lost_packets=0))
        )
    orders = {}
    for key in ("packets", "last", "pod", "node", "source"):
        assert run(kubectl, "--sort", key, "-o", "json") == 0
        orders[key] = [
            f"{one['node']}{one['process']}"
            for one in json.loads(capsys.readouterr().out)["sources"]
        ]
    assert orders == {
        "packets": ["az", "aa", "ab", "bz", "ba", "bb"],
        "last": ["az", "bz", "aa", "ba", "ab", "bb"],
        "pod": ["ab", "bb", "az", "bz", "aa", "ba"],
        "node": ["az", "aa", "ab", "bz", "ba", "bb"],
        "source": ["ab", "bb", "aa", "ba", "az", "bz"],
    }


def test_host_network_pod_is_named_and_a_scan_is_one_line(
    kubectl: KubectlStandin, capsys: pytest.CaptureFixture[str]
) -> None:
    scan: dict[str, Any] = {"has_many_ports": True, "port": 0, "port_count": 90, "lowest_port": 1}
    rows = (
        source("web", 9, cgroup="/kubepods/pod1/2", source_pod="mix/scraper-5xq2z"),
        source("db", 3, highest_port=443, cgroup="/", **scan),
    )
    assert listed(kubectl, capsys, *rows) == [
        "a shop/web tcp 8080 drop 9 60s ago curl in pod mix/scraper-5xq2z",
        "a shop/db tcp, 90 ports (1-443) drop 3 60s ago curl in root cgroup (/)",
    ]


def test_only_the_first_sources_of_all_nodes_are_listed(
    nodes: KubectlStandin, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(nodes, "--top", "2") == 0
    output = capsys.readouterr().out
    assert "shop/db" not in output
    assert "1 further sources are left out (--top)." in output


def test_mark_is_set_on_all_nodes(
    nodes: KubectlStandin, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes.respond("exec", "agent-b", "--mark", error="podgate: no agent responds\n")
    assert run(nodes, "--mark") == 1
    captured = capsys.readouterr()
    assert captured.out.startswith("Marked on 1 of 2 nodes")
    assert captured.err == "b: podgate: no agent responds\n"
    assert run(nodes, "--since", "mark") == 0
    assert len(nodes.calls("exec", "--since=mark")) == 2


def test_top_that_is_no_number_is_a_usage_error(
    nodes: KubectlStandin, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(nodes, "--top", "0")
    assert "a number from 1 on" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["-n", "shop"], ["web", "db"]),
        (["--pod", "web"], ["web", "web"]),
        (["--pod", "other/web"], ["web"]),
        (["--since", "1h"], ["web", "web"]),
        (["--since", "90m"], ["web", "web", "db"]),
        (["--since", "180s"], ["web", "web"]),
        (["--since", "179s"], ["web"]),
        (["--sort", "last"], ["web", "web", "db"]),
        (["--sort", "pod"], ["web", "db", "web"]),
    ],
)
def test_sources_are_chosen_and_sorted(
    nodes: KubectlStandin,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    expected: list[str],
) -> None:
    assert run(nodes, *arguments, "-o", "json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["pod"] for one in found["sources"]] == expected


def test_one_node_is_queried_alone(nodes: KubectlStandin) -> None:
    assert run(nodes, "--node", "b") == 0
    assert not nodes.calls("exec", "agent-a")


def test_node_that_does_not_answer_is_named_beside_the_others_sources(
    nodes: KubectlStandin, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes.respond("exec", "agent-b", error="podgate: no agent responds\n")
    assert run(nodes, "-o", "yaml") == 1
    captured = capsys.readouterr()
    found = yaml.safe_load(captured.out)
    assert [one["node"] for one in found["sources"]] == ["a", "a"]
    assert found["problems"] == {"b": "podgate: no agent responds"}
    assert captured.err == "b: podgate: no agent responds\n"


def test_node_that_does_not_answer_is_no_all_clear(
    nodes: KubectlStandin, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes.respond("exec", "agent-b", error="podgate: no agent responds\n")
    assert run(nodes, "-n", "none") == 1
    text = "No host process of the nodes that answered has opened a flow to these pods"
    assert text in capsys.readouterr().out
    nodes.respond("exec", error="podgate: no agent responds\n")
    assert run(nodes, "-n", "none") == 3
    assert capsys.readouterr().out == ""


def test_time_that_is_none_is_a_usage_error(
    nodes: KubectlStandin, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(nodes, "--since", "yesterday")
    assert ended.value.code == 2
    assert "a time such as 90s, 15m, 24h or 7d" in capsys.readouterr().err


EVENT = DropEventStatus(
    at=AT.replace(microsecond=123456),
    namespace="shop",
    pod="web",
    verdict="drop",
    reason="node",
    protocol="tcp",
    source_address="198.18.0.1",
    source_port=4000,
    destination_address="198.18.1.2",
    destination_port=8080,
    cgroup="/system.slice/backup.service",
    process=1454,
    process_name="curl",
)


def test_event_is_one_line() -> None:
    assert drop_stream.describe(encoded(EVENT)) == (
        "12:00:00.123  drop node: curl (1454) in unit backup.service -> shop/web tcp 8080"
    )
    of_pod = msgspec.structs.replace(EVENT, source_pod="mix/scraper")
    assert "curl (1454) in pod mix/scraper ->" in drop_stream.describe(encoded(of_pod))
    unknown = msgspec.structs.replace(EVENT, process=0, process_name="", cgroup="", pod="")
    assert drop_stream.describe(encoded(msgspec.structs.replace(unknown, namespace=""))) == (
        "12:00:00.123  drop node: 198.18.0.1 -> 198.18.1.2 tcp 8080"
    )


def stream(*lines: object, then: str) -> str:
    """A shell script that prints lines, and does something else then."""
    printed = "".join(f"echo '{json.dumps(line)}'\n" for line in lines)
    return f"#!/bin/sh\n{printed}{then}\n"


def test_streams_of_all_nodes_are_one_and_leave_no_process(
    kubectl: KubectlStandin, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kubectl.serve_nodes("a", "b")
    pids = tmp_path / "pids"
    command = tmp_path / "streaming"
    monkeypatch.setattr(drop_stream, "_END_SECONDS", 1.0)
    ended = tmp_path / "ended"
    # One ends with its input, as kubectl does, and one hangs.
    for node, then in (("a", f"cat > /dev/null\ntouch {ended}"), ("b", "exec sleep 1000")):
        path = tmp_path / f"of-{node}"
        text = stream({"pod": node}, then=f"echo $$ >> {pids}\n{then}")
        path.write_text(text, encoding="utf-8")
        path.chmod(0o755)
    command.write_text(
        "#!/bin/sh\n"
        f'case "$*" in exec*agent-a*) exec {tmp_path}/of-a;; exec*agent-b*) exec {tmp_path}/of-b;; '
        f'esac\nexec {kubectl.command} "$@"\n',
        encoding="utf-8",
    )
    command.chmod(0o755)
    found = drop_stream.lines(Cluster([str(command)]), ["a", "b"])
    received = [next(found), next(found)]
    assert {(one.node, one.text) for one in received} == {
        ("a", '{"pod": "a"}\n'),
        ("b", '{"pod": "b"}\n'),
    }
    started = polling.wait_until(
        "both hang", lambda: pids.exists() and len(ids := pids.read_text().split()) == 2 and ids
    )
    found.close()
    assert isinstance(started, list)
    directories = [pathlib.Path("/proc", process) for process in started]
    polling.wait_until("their end", lambda: not any(one.exists() for one in directories))
    assert ended.exists()


def test_stream_that_ends_is_started_again_in_the_agent_of_that_time(
    kubectl: KubectlStandin,
) -> None:
    kubectl.serve_nodes("a")
    kubectl.respond("exec", "agent-a", "--follow", output={"pod": "first"})
    found = drop_stream.lines(Cluster([kubectl.command]), ["a"], retry_seconds=0.01)
    assert next(found).text == '{"pod": "first"}'
    assert next(found).problem == "the stream has ended; trying again"
    kubectl.respond("exec", "agent-a", "--follow", output={"pod": "second"})
    while next(found).text != '{"pod": "second"}':
        pass
    kubectl.serve_nodes("a", without_agent=["a"])
    while next(found).problem != "no agent runs on this node; trying again":
        pass
    found.close()


def test_stream_that_fails_has_its_last_words_once(kubectl: KubectlStandin) -> None:
    kubectl.serve_nodes("a", "b")
    ended = "command terminated with exit code 1\n"
    error = f"podgate: it starts\npodgate: it is lost\n{ended}"
    kubectl.respond("exec", "agent-a", "--follow", error=error)
    found = drop_stream.lines(Cluster([kubectl.command]), ["a"], retry_seconds=0.01)
    assert next(found) == NodeLine("a", problem="podgate: it is lost; trying again")
    crashing = agent_pod("a")
    waiting = {"waiting": {"reason": "CrashLoopBackOff"}}
    crashing["status"]["containerStatuses"] = [
        {"name": "agent", "restartCount": 3, "state": waiting}
    ]
    pods = {"items": [crashing, agent_pod("b")]}
    polling.wait_until("it is tried again", lambda: len(kubectl.calls("--follow")) > 2)
    kubectl.respond("get", "pods", output=pods)
    problem = "its agent does not run: CrashLoopBackOff after 3 restarts; trying again"
    assert next(found) == NodeLine("a", problem=problem)
    found.close()
    call, _ = kubectl.calls("--follow")[0]
    assert call == [
        *("exec", "--stdin", "--namespace=podgate", "--container=agent", "agent-a", "--"),
        *("podgate", "drops", "--follow", "--output=json", "--end-with-input"),
    ]


def test_too_many_nodes_to_follow_is_one_sentence(
    kubectl: KubectlStandin, capsys: pytest.CaptureFixture[str]
) -> None:
    kubectl.serve_nodes(*(f"node-{number}" for number in range(65)))
    assert main.main(["--kubectl", kubectl.command, "drops", "--follow"]) == 1
    assert "65 nodes are too many to follow at once (at most 64)" in capsys.readouterr().err
    # As many as are possible, of which none has an agent.
    names = [f"node-{number}" for number in range(64)]
    kubectl.serve_nodes(*names, without_agent=names)
    chosen = [f"--node={name}" for name in names]
    assert main.main(["--kubectl", kubectl.command, "drops", "--follow", *chosen]) == 3
    assert "no agent responds" in capsys.readouterr().err


class _EndOfStreams(Exception):
    """Ends a command that follows until it is interrupted."""


def followed(
    kubectl: KubectlStandin,
    monkeypatch: pytest.MonkeyPatch,
    *lines: drop_stream.NodeLine,
    form: str,
) -> None:
    """What `drops --follow` prints of these lines."""

    def streams(_: Cluster, nodes: Sequence[str]) -> Generator[drop_stream.NodeLine, None, None]:
        assert list(nodes) == ["a", "node-b"]
        yield from lines
        raise _EndOfStreams

    monkeypatch.setattr(drop_stream, "lines", streams)
    kubectl.serve_nodes("a", "node-b", "silent", without_agent=["silent"])
    with pytest.raises(_EndOfStreams):
        run(kubectl, "--follow", "--pod", "web", "-o", form)


LINES = (
    drop_stream.NodeLine("a", json.dumps(encoded(EVENT))),
    drop_stream.NodeLine("a", json.dumps(encoded(msgspec.structs.replace(EVENT, pod="db")))),
    drop_stream.NodeLine("node-b", '{"at": "2026-01-01T12:00:01.5Z", "suppressed": 7}'),
    drop_stream.NodeLine("node-b", problem="the stream has ended; trying again"),
    drop_stream.NodeLine("node-b", "{no event"),
)


def test_followed_events_are_chosen_and_have_their_node(
    kubectl: KubectlStandin, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    followed(kubectl, monkeypatch, *LINES, form="table")
    captured = capsys.readouterr()
    assert captured.out.splitlines() == [
        f"a       {drop_stream.describe(encoded(EVENT))}",
        "node-b  12:00:01.5  7 drop events were suppressed by the kernel's limit; 'drops' without "
        "--follow counts all.",
    ]
    assert captured.err.splitlines() == [
        "silent: no agent runs on this node",
        "node-b: the stream has ended; trying again",
        "node-b: {no event",
    ]


def test_followed_events_are_one_json_document_a_line(
    kubectl: KubectlStandin, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    named = encoded(msgspec.structs.replace(EVENT, process_name="größe"))
    lines = (drop_stream.NodeLine("a", json.dumps(named)), *LINES[1:])
    followed(kubectl, monkeypatch, *lines, form="json")
    event, suppressed = capsys.readouterr().out.splitlines()
    assert json.loads(event) == {"node": "a", **named}
    assert "größe" in event
    assert suppressed == '{"node": "node-b", "at": "2026-01-01T12:00:01.5Z", "suppressed": 7}'


def test_no_agent_to_follow_has_its_own_exit_status(
    kubectl: KubectlStandin, capsys: pytest.CaptureFixture[str]
) -> None:
    kubectl.serve_nodes("a", without_agent=["a"])
    assert run(kubectl, "--follow", "--node", "a") == 3
    assert "no agent responds; see 'kubectl podgate status'" in capsys.readouterr().err
