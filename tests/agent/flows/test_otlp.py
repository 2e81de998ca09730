"""Records to a real receiver of OTLP: what it accepts and what is counted as lost is all of it."""

import contextlib
import os
import pathlib
import ssl
import threading
from collections.abc import Iterator

import prometheus_client
import pytest

from agent.admin import finding_kinds as kinds
from agent.admin import findings
from agent.backoff import Backoff
from agent.flows.otlp import OtlpOutput, read_headers
from agent.flows.outlet import Outlet, RecordsRejectedError
from agent.flows.records import AdmissionRecord, DestinationRecord, DropRecord, SourceRecord
from tests.agent.api.certificates import Authority
from tests.agent.flows.otlp_receiver import Receiver, attributes, receiver
from tests.agent.flows.test_outlet import NOW, Clock, flow
from tests.agent.operate.page.reports import report
from tests.polling import wait_until

BATCHES = 4
PER_BATCH = 25


@pytest.fixture
def served() -> Iterator[Receiver]:
    with receiver() as made:
        yield made


@contextlib.contextmanager
def outlet(
    url: str,
    *,
    max_queued: int = 1000,
    clock: Clock | None = None,
    headers: pathlib.Path | None = None,
    authority: pathlib.Path | None = None,
) -> Iterator[Outlet]:
    output = OtlpOutput(
        url,
        node="n1",
        version="9",
        headers=headers,
        authority=authority,
        timeout_seconds=60,
    )
    at_once = Backoff(base_seconds=0, cap_seconds=0)
    made = Outlet(
        output,
        name="the receiver",
        node="n1",
        max_queued=max_queued,
        backoff=at_once,
        clock=clock or Clock(),
    )
    made.start()
    try:
        yield made
    finally:
        made.close(60)


def metric(of: Outlet, name: str, **labels: str) -> int:
    registry = prometheus_client.CollectorRegistry()
    registry.register(of)
    return int(registry.get_sample_value(name, labels) or 0)


def lost(of: Outlet) -> int:
    return sum(
        metric(of, "podgate_flow_packets_lost_total", place=place)
        for place in ("queue", "rejected")
    )


def put_all(of: Outlet) -> int:
    """The packets of all records."""
    for number in range(BATCHES):
        of.put([flow(number + 1)] * PER_BATCH)
    return PER_BATCH * sum(range(1, BATCHES + 1))


def test_attributes_have_the_names_of_opentelemetry(served: Receiver) -> None:
    source = SourceRecord(cgroup="/system.slice/a.service", process="curl", pod="mon/agent")
    drop = DropRecord(
        time=NOW,
        node="n1",
        verdict="DROPPED",
        reason="node",
        source=source,
        destination=DestinationRecord(namespace="shop", pod="web"),
        protocol=6,
        source_address="198.18.0.1",
        source_port=4000,
        destination_address="198.18.0.2",
        destination_port=80,
        pid=17,
    )
    rule = AdmissionRecord(
        time=NOW, node="n1", policy="dns", source="any", protocol="udp", ports="53", flows=3
    )
    with outlet(served.url) as out:
        out.put([drop, flow(5), rule])
        wait_until("the records", lambda: len(served.logs) == 3)
    assert served.paths == ["/v1/logs"]
    assert served.resources == [
        {"service.name": "podgate", "service.version": "9", "k8s.node.name": "n1"}
    ]
    single, summary, admission = served.logs
    assert [one.event_name for one in served.logs] == [
        "podgate.drop",
        "podgate.flow",
        "podgate.admission",
    ]
    assert [one.severity_text for one in served.logs] == ["WARN", "INFO", "INFO"]
    assert {one.time_unix_nano for one in served.logs} == {int(NOW.timestamp()) * 10**9}
    assert single.body.string_value == "DROPPED (node) curl in pod mon/agent to shop/web tcp 80"
    assert attributes(single.attributes) == {
        "source.address": "198.18.0.1",
        "source.port": 4000,
        "destination.address": "198.18.0.2",
        "destination.port": 80,
        "network.transport": "tcp",
        "network.type": "ipv4",
        "process.pid": 17,
        "process.executable.name": "curl",
        "process.linux.cgroup": "/system.slice/a.service",
        "k8s.namespace.name": "shop",
        "k8s.pod.name": "web",
        "podgate.source.namespace.name": "mon",
        "podgate.source.pod.name": "agent",
        "podgate.verdict": "DROPPED",
        "podgate.reason": "node",
    }
    of_summary = attributes(summary.attributes)
    assert of_summary["podgate.packets"] == 5
    assert of_summary["destination.port"] == 80
    assert of_summary["podgate.verdict"] == "AUDIT"
    assert attributes(admission.attributes)["podgate.flows"] == 3


def test_receiver_that_hangs_blocks_nothing_and_what_overflows_is_counted(served: Receiver) -> None:
    served.passes.clear()
    with outlet(served.url, max_queued=40) as out:
        happened = put_all(out)
        assert lost(out), "the queue is smaller"
        wait_until("an attempt", lambda: len(served.requests) == 1)
        served.passes.set()
        wait_until(
            "all of it",
            lambda: (
                served.sum("podgate.packets") + served.sum("podgate.lost.packets") == happened
                and served.sum("podgate.packets") + lost(out) == happened
            ),
        )


def test_attempt_ends_though_the_receiver_hangs(served: Receiver) -> None:
    served.passes.clear()
    output = OtlpOutput(served.url, node="n1", version="9", timeout_seconds=0.05)
    with pytest.raises(OSError, match="timed out"):
        output.send([flow(1)])
    output.close()


def test_receiver_that_is_gone_is_a_finding_and_each_packet_is_counted() -> None:
    clock = Clock()
    with receiver() as gone:
        url = gone.url
    with outlet(url, clock=clock) as out:
        happened = put_all(out)
        wait_until("the loss", lambda: lost(out) > 0)
        clock.now = 61.0
        assert "Connection refused" in out.problem()
        wait_until("all of it", lambda: lost(out) == happened)


def test_receiver_that_is_overloaded_gets_the_records_later(served: Receiver) -> None:
    served.overloaded = 3
    with outlet(served.url) as out:
        happened = put_all(out)
        wait_until("all records", lambda: served.sum("podgate.packets") == happened)
        assert lost(out) == 0


@pytest.mark.parametrize("status", [300, 302, 400, 413, 500])
def test_answer_that_forbids_another_attempt_is_a_loss_and_a_finding(
    served: Receiver, status: int
) -> None:
    """Also a redirect, which is no success."""
    served.status = status
    clock = Clock()
    with outlet(served.url, clock=clock) as out:
        out.put([flow(4), flow(5)])
        wait_until("the loss", lambda: lost(out) == 9)
        clock.now = 61.0
        wait_until("the finding", lambda: bool(out.problem()))
        (found,) = findings.find(report(flow_problems=[out.problem()]))
        assert found.kind == kinds.FLOWS_NOT_WRITTEN.name
        assert f"It answers {status}" in found.sentence
        served.status = 200
        out.put([flow(1)])
        wait_until("the next", lambda: served.sum("podgate.packets") == 1)
        assert served.sum("podgate.lost.packets") == 9
        assert served.sum("podgate.lost.records") == 2
        wait_until("the end of the finding", lambda: not out.problem())
    assert set(served.paths) == {"/v1/logs"}


def test_records_of_a_partial_success_are_counted(served: Receiver) -> None:
    """The answer does not name them, so all packets of the request count."""
    served.rejected = 2
    with outlet(served.url) as out:
        out.put([flow(4), flow(5), flow(6)])
        wait_until("the loss", lambda: lost(out) == 15)
        served.rejected = 0
        wait_until("its record", lambda: served.sum("podgate.lost.records") >= 1)
        place = {"place": "rejected"}
        assert metric(out, "podgate_flow_records_lost_total", **place) == 2
        assert metric(out, "podgate_flow_records_total") == 1


@pytest.mark.parametrize(("reason", "words"), [("too old", "too old"), ("", "no reason")])
def test_rejected_records_have_their_number_and_the_reason(
    served: Receiver, reason: str, words: str
) -> None:
    served.rejected, served.reason = 2, reason
    output = OtlpOutput(served.url, node="n1", version="9")
    with pytest.raises(RecordsRejectedError, match=f"^It rejects some: {words}$") as error:
        output.send([flow(4), flow(5), flow(6)])
    assert error.value.records == 2
    output.close()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_connection_is_kept_until_the_end(served: Receiver) -> None:
    before = descriptors()
    output = OtlpOutput(served.url, node="n1", version="9")
    for number in range(3):
        output.send([flow(number)])
    assert len(served.clients) == 1
    output.close()
    wait_until("the end of the connection", lambda: descriptors() <= before)


def test_rest_of_a_long_answer_is_not_the_next_answer(served: Receiver) -> None:
    output = OtlpOutput(served.url, node="n1", version="9")
    served.status, served.page = 400, b"x" * (200 << 10)
    for _ in range(2):
        with pytest.raises(RecordsRejectedError, match="It answers 400"):
            output.send([flow(1)])
    served.status, served.page = 200, b""
    output.send([flow(2)])
    output.close()
    assert served.sum("podgate.packets") == 2


@pytest.mark.parametrize("status", [200, 202, 299])
def test_every_status_of_success_is_one(served: Receiver, status: int) -> None:
    served.status = status
    output = OtlpOutput(served.url, node="n1", version="9")
    output.send([flow(1)])
    output.close()
    assert served.paths == ["/v1/logs"]


@pytest.mark.parametrize("status", [401, 403, 408, 429, 502, 503, 504])
def test_answer_that_may_change_is_an_error_that_rejects_no_record(
    served: Receiver, status: int
) -> None:
    served.status = status
    output = OtlpOutput(served.url, node="n1", version="9")
    with pytest.raises(OSError, match=rf"^It answers {status}\.$") as error:
        output.send([flow(4)])
    assert not isinstance(error.value, RecordsRejectedError)
    output.close()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {}),
        ("A: b\n\n  \nC:d: e\n", {"A": "b", "C": "d: e"}),
        (" A : b ", {"A": "b"}),
    ],
)
def test_headers_of_a_file(tmp_path: pathlib.Path, text: str, expected: dict[str, str]) -> None:
    (tmp_path / "headers").write_text(text)
    assert read_headers(tmp_path / "headers") == expected


def test_line_that_is_no_header_is_named_with_its_file(tmp_path: pathlib.Path) -> None:
    (tmp_path / "headers").write_text("A: b\nsecret\n")
    with pytest.raises(ValueError, match="headers has a line that is no header") as error:
        read_headers(tmp_path / "headers")
    assert "secret" not in str(error.value)


def test_headers_are_read_from_their_file_for_each_request(
    served: Receiver, tmp_path: pathlib.Path
) -> None:
    headers = tmp_path / "headers"
    headers.write_text("Authorization: Bearer old\nX-Scope-OrgID: nodes\n")
    served.status = 401
    with outlet(served.url, headers=headers) as out:
        out.put([flow(1)])
        wait_until("a request", lambda: len(served.requests) > 0)
        headers.write_text("Authorization: Bearer new\n")
        served.status = 200
        out.put([flow(2)])
        wait_until("the last", lambda: served.sum("podgate.packets") + lost(out) == 3)
    assert served.requests[0]["Authorization"] == "Bearer old"
    assert served.requests[0]["X-Scope-OrgID"] == "nodes"
    assert served.requests[-1]["Authorization"] == "Bearer new"


def test_certificate_is_verified(tmp_path: pathlib.Path) -> None:
    files = Authority.make().files(tmp_path)
    others = Authority.make("other").files(tmp_path / "other")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.certificate, files.key)
    with receiver(context) as served:
        with outlet(served.url, authority=others.authorities) as out:
            out.put([flow(1)])
            wait_until("the loss", lambda: lost(out) == 1)
        assert not served.requests
        with outlet(served.url, authority=files.authorities) as out:
            out.put([flow(2)])
            wait_until("the record", lambda: served.sum("podgate.packets") == 2)


@pytest.mark.parametrize("has_authority", [True, False])
def test_system_s_authorities_count_without_one_of_its_own(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, has_authority: bool
) -> None:
    files = Authority.make().files(tmp_path)
    others = Authority.make("other").files(tmp_path / "other")
    monkeypatch.setenv("SSL_CERT_FILE", str(files.authorities))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.certificate, files.key)
    authority = others.authorities if has_authority else None
    with receiver(context) as served, outlet(served.url, authority=authority) as out:
        out.put([flow(2)])
        wait_until("the end", lambda: lost(out) + served.sum("podgate.packets") == 2)
        assert lost(out) == (2 if has_authority else 0)


def test_end_does_not_wait_for_a_receiver_that_hangs(served: Receiver) -> None:
    served.passes.clear()
    with outlet(served.url) as out:
        out.put([flow(1)])
        wait_until("the request", lambda: len(served.requests) == 1)
        closing = threading.Thread(target=out.close, args=(0.01,))
        closing.start()
        closing.join(30)
        assert not closing.is_alive()
        served.passes.set()
