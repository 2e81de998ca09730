"""The annotation becomes probes, or one error that names the field; its schema agrees."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from probes.spec import handler_fields, probespec, specs
from probes.spec.definitions import (
    CertificateName,
    Grpc,
    HttpGet,
    OtherNetwork,
    Probe,
    TcpSocket,
    TlsPolicy,
)
from tests.probes import servers

PORTS = {"app": {"web": 8080}, "side": {}}
HERE = "metadata.annotations[podgate.io/probe-spec]"


def spec(readiness: object, name: str = "app", kind: str = "readiness") -> str:
    return json.dumps(
        {"apiVersion": "podgate.io/v2", "containers": [{"name": name, kind: readiness}]}
    )


def readiness(probe: object) -> Probe:
    found = probespec.read(spec(probe), PORTS)["app"].readiness
    assert found is not None
    return found


def wrong(text: str) -> specs.FieldProblem:
    with pytest.raises(probespec.ProbeSpecError) as caught:
        probespec.read(text, PORTS)
    return caught.value.error


def test_defaults_are_those_of_the_api() -> None:
    assert readiness({"tcp": {"port": 80}}) == Probe(TcpSocket(80))
    assert readiness({"http": {"port": 80}}) == Probe(HttpGet(80))
    assert readiness({"grpc": {"port": 80}}) == Probe(Grpc(80))


def test_all_fields_are_read() -> None:
    http = {
        "port": "web",
        "path": "/x?y",
        "scheme": "HTTPS",
        "protocol": "HTTP1",
        "httpHeaders": [{"name": "X-A", "value": "1"}, {"name": "x-a", "value": "2"}],
        "host": "",
    }
    given_fields = {
        "http": http,
        "initialDelaySeconds": 3,
        "periodMilliseconds": 250,
        "timeoutMilliseconds": 40,
        "successThreshold": 2,
        "failureThreshold": 5,
        "ipFamily": "IPv6",
        "ipFamilyPolicy": "PreferDualStack",
        "target": "localhost",
        "failWhenListenerCloses": True,
    }
    headers = (("X-A", "1"), ("x-a", "2"))
    assert readiness(given_fields) == Probe(
        HttpGet(8080, "/x?y", "HTTPS", headers),
        initial_delay_seconds=3.0,
        timeout_seconds=0.04,
        period_seconds=0.25,
        success_threshold=2,
        failure_threshold=5,
        ip_family="IPv6",
        ip_family_policy="PreferDualStack",
        target="localhost",
        fail_when_listener_closes=True,
    )


def test_content_of_a_response_may_be_named() -> None:
    found = readiness({"http": {"port": 80, "statuses": [204, "300-399"], "bodyContains": "ok"}})
    statuses = ((204, 204), (300, 399))
    assert found.handler == HttpGet(80, statuses=statuses, body_contains="ok")


def test_certificate_may_be_verified(tmp_path: Path) -> None:
    cert, _ = servers.certificate(tmp_path)
    given = {"serverName": "app.example", "caBundle": cert.read_text()}
    policy = TlsPolicy("app.example", cert.read_text())
    http = readiness({"http": {"port": 80, "scheme": "HTTPS", "tls": given}})
    assert http.handler == HttpGet(80, scheme="HTTPS", tls=policy)
    grpc = readiness({"grpc": {"port": 80, "mode": "TLS", "tls": given}})
    assert grpc.handler == Grpc(80, mode="TLS", tls=policy)


def test_further_network_is_named_by_interface_or_definition() -> None:
    by_interface = readiness({"tcp": {"port": 80}, "target": {"interface": "net1"}})
    assert by_interface.target == OtherNetwork(interface="net1")
    by_network = readiness({"tcp": {"port": 80}, "target": {"network": "shop/storage"}})
    assert by_network.target == OtherNetwork(network="shop/storage")


def test_probes_are_answered_only_on_request() -> None:
    assert readiness({"tcp": {"port": 80}}).answered is False
    assert readiness({"tcp": {"port": 80}, "answered": True}).answered is True


def test_whole_seconds_can_be_written_as_seconds() -> None:
    probe = readiness({"tcp": {"port": 1}, "periodSeconds": 2, "timeoutSeconds": 3})
    assert (probe.period_seconds, probe.timeout_seconds) == (2.0, 3.0)


def test_startup_and_liveness_have_a_grace_period() -> None:
    text = spec({"tcp": {"port": 1}, "terminationGracePeriodSeconds": 7}, kind="liveness")
    liveness = probespec.read(text, PORTS)["app"].liveness
    assert liveness is not None
    assert liveness.termination_grace_period_seconds == 7.0


@pytest.mark.parametrize(
    ("probe", "path"),
    [
        ({}, ""),
        ({"exec": {"command": ["true"]}}, ".exec"),
        ({"http": {"port": 80}, "tcp": {"port": 80}}, ".tcp"),
        ({"http": {}}, ".http.port"),
        ({"http": {"port": 0}}, ".http.port"),
        ({"http": {"port": 65536}}, ".http.port"),
        ({"http": {"port": "nobody"}}, ".http.port"),
        ({"http": {"port": None}}, ".http.port"),
        ({"http": {"port": 80, "scheme": "FTP"}}, ".http.scheme"),
        ({"http": {"port": 80, "scheme": "HTTPS", "protocol": "HTTP2"}}, ".http.protocol"),
        ({"http": {"port": 80, "paht": "/"}}, ".http.paht"),
        ({"http": {"port": 80, "httpHeaders": [{"name": "a b"}]}}, ".http.httpHeaders[0].name"),
        ({"http": {"port": 80, "httpHeaders": [{"name": "a\n"}]}}, ".http.httpHeaders[0].name"),
        ({"tcp": {"port": 80}, "periodMilliseconds": 99}, ".periodMilliseconds"),
        ({"tcp": {"port": 80}, "timeoutMilliseconds": 0}, ".timeoutMilliseconds"),
        ({"tcp": {"port": 80}, "timeoutSeconds": 1.5}, ".timeoutSeconds"),
        (
            {"tcp": {"port": 80}, "periodSeconds": 1, "periodMilliseconds": 100},
            ".periodMilliseconds",
        ),
        ({"tcp": {"port": 80}, "ipFamily": "IPv5"}, ".ipFamily"),
        ({"tcp": {"port": 80}, "ipFamilyPolicy": "Both"}, ".ipFamilyPolicy"),
        ({"tcp": {"port": 80}, "target": "node"}, ".target"),
        ({"tcp": {"port": 80}, "target": {}}, ".target"),
        ({"tcp": {"port": 80}, "target": {"interface": "a", "network": "b"}}, ".target"),
        ({"tcp": {"port": 80}, "target": {"interface": "a/b"}}, ".target.interface"),
        ({"tcp": {"port": 80}, "target": {"interface": "x" * 16}}, ".target.interface"),
        ({"tcp": {"port": 80}, "target": {"network": "Shop/net"}}, ".target.network"),
        ({"tcp": {"port": 80}, "answered": 1}, ".answered"),
        ({"http": {"port": 80, "tls": {"serverName": "a"}}}, ".http.tls"),
        ({"grpc": {"port": 80, "tls": {"serverName": "a"}}}, ".grpc.tls"),
        ({"http": {"port": 80, "scheme": "HTTPS", "tls": {}}}, ".http.tls.serverName"),
        (
            {"http": {"port": 80, "scheme": "HTTPS", "tls": {"serverName": "a b"}}},
            ".http.tls.serverName",
        ),
        (
            {"http": {"port": 80, "scheme": "HTTPS", "tls": {"serverName": "a", "caBundle": "x"}}},
            ".http.tls.caBundle",
        ),
        (
            {"http": {"port": 80, "scheme": "HTTPS", "tls": {"serverName": "a", "caBundle": "é"}}},
            ".http.tls.caBundle",
        ),
        ({"http": {"port": 80, "statuses": [99]}}, ".http.statuses[0]"),
        ({"http": {"port": 80, "statuses": ["2xx"]}}, ".http.statuses[0]"),
        ({"http": {"port": 80, "statuses": ["299-200"]}}, ".http.statuses[0]"),
        ({"http": {"port": 80, "statuses": [200] * 17}}, ".http.statuses"),
        ({"http": {"port": 80, "bodyContains": "x" * 257}}, ".http.bodyContains"),
        (
            {"tcp": {"port": 80}, "terminationGracePeriodSeconds": 1},
            ".terminationGracePeriodSeconds",
        ),
    ],
)
def test_error_names_the_path_of_the_wrong_field(probe: dict[str, object], path: str) -> None:
    error = wrong(spec(probe))
    assert (error.path, error.reason) == (
        f"{HERE}.containers[0].readiness{path}",
        "InvalidProbeSpec",
    )
    assert error.message.startswith(f"{error.path} ")
    assert error.message.endswith(".")


@pytest.mark.parametrize(
    ("probe", "complaint"),
    [
        ({"http": {"path": "/"}}, ".http.port is missing"),
        ({"http": {"port": 80, "p" * 70: 1}}, f".http.{'p' * 64} is not known here"),
        ({"http": {"port": "none"}}, ".http.port names 'none', no port of this container"),
        (
            {"tcp": {"port": 80, "host": "a"}},
            ".tcp.host must be empty: a probe goes to its own pod only",
        ),
        ({"tcp": {"port": 80}, "answered": 1}, ".answered is wrong: expected bool, got int"),
        ({"tcp": {"port": 80}, "target": {}}, ".target needs one of interface and network"),
    ],
)
def test_error_names_what_is_wrong(probe: dict[str, object], complaint: str) -> None:
    assert wrong(spec(probe)).message == f"{HERE}.containers[0].readiness{complaint}."


def test_annotation_may_be_as_long_as_the_api_allows() -> None:
    text = spec({"tcp": {"port": 1}})
    fill = " " * (probespec.SIZE_MAX_BYTES - len(text))
    assert set(probespec.read(text + fill, PORTS)) == {"app"}
    assert wrong(text + fill + " ").message == f"{HERE} is longer than 262144 bytes."


def test_each_probe_of_each_container_is_read() -> None:
    tcp = [{"tcp": {"port": port}} for port in range(1, 5)]
    text = json.dumps(
        {
            "apiVersion": "podgate.io/v2",
            "containers": [
                {"name": "app", "startup": tcp[0], "readiness": tcp[1], "liveness": tcp[2]},
                {"name": "side", "readiness": tcp[3]},
            ],
        }
    )
    probes = [Probe(TcpSocket(port)) for port in range(1, 5)]
    assert probespec.read(text, PORTS) == {
        "app": specs.ContainerProbes("app", probes[0], probes[1], probes[2]),
        "side": specs.ContainerProbes("side", readiness=probes[3]),
    }


@pytest.mark.parametrize("handler", ["http", "tcp"])
@pytest.mark.parametrize("host", ["10.0.0.1", "127.0.0.1", "evil.test"])
def test_host_is_rejected_with_its_own_reason(handler: str, host: str) -> None:
    error = wrong(spec({handler: {"port": 80, "host": host}}))
    assert error.reason == "ProbeHostNotAllowed"
    assert error.path == f"{HERE}.containers[0].readiness.{handler}.host"


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("{}", ".apiVersion"),
        ('{"apiVersion":"podgate.io/v1"}', ".apiVersion"),
        ("[]", ""),
        ("{", ""),
        ("[" * 100_000, ""),
        (" " * (probespec.SIZE_MAX_BYTES + 1), ""),
        (spec({"tcp": {"port": 1}}, name="nobody"), ".containers[0].name"),
        (spec({"tcp": {"port": 1}, "successThreshold": 2}, kind="startup"), None),
        (
            '{"apiVersion":"podgate.io/v2","containers":[{"name":"app"},{"name":"app"}]}',
            ".containers[1].name",
        ),
    ],
)
def test_what_is_no_spec_is_one_sentence(text: str, path: str | None) -> None:
    expected = ".containers[0].startup.successThreshold" if path is None else path
    assert wrong(text).path == HERE + expected


@given(st.text() | st.recursive(st.none() | st.text(), lambda s: st.lists(s)).map(json.dumps))
def test_any_text_is_rejected_without_another_effect(text: str) -> None:
    assert wrong(text).path.startswith(HERE)


def manifest(annotation: str, **container: object) -> dict[str, object]:
    return {
        "metadata": {"annotations": {"podgate.io/probe-spec": annotation}},
        "spec": {"containers": [{"name": "app", **container}]},
    }


def test_annotation_replaces_the_same_probe_and_keeps_the_others() -> None:
    parsed = specs.parse_pod(
        manifest(
            spec({"tcp": {"port": "web"}, "periodMilliseconds": 200}),
            ports=[{"name": "web", "containerPort": 9090}],
            readinessProbe={"httpGet": {"port": 80}},
            livenessProbe={"tcpSocket": {"port": 81}},
        )
    )
    (app,) = parsed.containers
    assert app.readiness == Probe(TcpSocket(9090), period_seconds=0.2)
    assert app.liveness == Probe(TcpSocket(81))
    assert parsed.declared == specs.DeclaredPorts(any_port=True, ports=frozenset({80, 81}))


@pytest.mark.parametrize(
    ("fields", "period"),
    [
        ({"answered": True}, 4.0),
        ({"answered": True, "periodSeconds": 30}, 4.0),
        ({"answered": True, "periodMilliseconds": 250}, 0.25),
        ({"periodSeconds": 30}, 30.0),
    ],
)
def test_answered_probe_runs_as_often_as_the_kubelets(
    fields: dict[str, object], period: float
) -> None:
    text = spec({"tcp": {"port": 80}, **fields})
    of_kubelet = {"tcpSocket": {"port": 80}, "periodSeconds": 4}
    found = specs.parse_pod(manifest(text, readinessProbe=of_kubelet)).containers[0].readiness
    assert found is not None
    assert found.period_seconds == period


def test_wrong_annotation_is_an_error_of_the_pod_and_leaves_its_probes() -> None:
    parsed = specs.parse_pod(manifest("{}", readinessProbe={"tcpSocket": {"port": 80}}))
    assert [error.reason for error in parsed.errors] == ["InvalidProbeSpec"]
    assert parsed.containers[0].readiness == Probe(TcpSocket(80))


def test_schema_names_every_field_of_the_code_and_refuses_others() -> None:
    made = probespec.schema()
    for struct in (
        probespec.ProbeSpec,
        probespec.ContainerFields,
        probespec.ProbeFields,
        handler_fields.HttpFields,
        handler_fields.GrpcFields,
        handler_fields.TlsFields,
        probespec.NetworkFields,
    ):
        described: dict[str, Any] = made["$defs"][struct.__name__]
        fields = {field.encode_name for field in msgspec.structs.fields(struct)}
        assert set(described["properties"]) == fields
        assert described["additionalProperties"] is False


CERTIFICATE = {"secret": "queue-client"}


def _of_tls(tls: dict[str, Any]) -> TlsPolicy | None:
    http = {"port": 443, "scheme": "HTTPS", "tls": tls}
    text = json.dumps(
        {
            "apiVersion": "podgate.io/v2",
            "containers": [{"name": "app", "liveness": {"http": http}}],
        }
    )
    probe = probespec.read(text, {"app": {}})["app"].liveness
    assert probe is not None
    assert isinstance(probe.handler, HttpGet)
    return probe.handler.tls


def test_client_certificate_is_named_by_secret_or_file() -> None:
    policy = _of_tls({"clientCertificate": CERTIFICATE})
    assert policy == TlsPolicy(certificate=CertificateName(secret="queue-client"))
    policy = _of_tls(
        {"clientCertificate": {"file": "queue", "verifyServer": True}, "serverName": "a.test"}
    )
    assert policy == TlsPolicy(
        "a.test", certificate=CertificateName(file="queue", verifies_server=True)
    )


@pytest.mark.parametrize(
    ("tls", "text"),
    [
        ({}, "serverName is missing"),
        ({"clientCertificate": {}}, "needs one of secret and file"),
        ({"clientCertificate": {"secret": "a", "file": "b"}}, "needs one of secret and file"),
        ({"clientCertificate": {"secret": "a", "verifyServer": True}}, "serverName is missing"),
        ({"clientCertificate": {"file": ".."}}, "clientCertificate.file is wrong"),
        ({"clientCertificate": {"file": "bank/vault"}}, "clientCertificate.file is wrong"),
        ({"clientCertificate": {"file": "/etc"}}, "clientCertificate.file is wrong"),
    ],
)
def test_client_certificate_that_is_no_name_is_rejected(tls: dict[str, Any], text: str) -> None:
    with pytest.raises(probespec.ProbeSpecError, match=text):
        _of_tls(tls)
