"""A kind of handler is one struct and one entry: all else follows from the table."""

import re

import msgspec
import pytest

from probes.engine import prober
from probes.protocols.tcp import TcpTarget
from probes.spec import definitions, handlers
from probes.spec.fields import Fields
from probes.spec.handler_fields import TcpFields
from probes.spec.handlers import KINDS, HandlerKind
from probes.spec.specs import parse_pod
from tests.image import manifests

ADDRESSES = ("198.18.1.1",)


class Echo(msgspec.Struct, frozen=True):
    """A kind that the API may get."""

    port: int

    def __str__(self) -> str:
        return f"echo :{self.port}"


def read_echo(fields: Fields, named_ports: dict[str, int]) -> Echo:
    return Echo(fields.integer("port", default=7, minimum=1) or 7)


@pytest.fixture
def echo(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = HandlerKind(
        Echo,
        "echo",
        TcpFields,
        read_echo,  # type: ignore[arg-type]
        lambda handler, address, timeout_seconds: TcpTarget(handler.port),
        has_host=True,
    )
    monkeypatch.setitem(KINDS, "echoSocket", kind)


def pod(probe: object) -> object:
    return {"spec": {"containers": [{"name": "app", "livenessProbe": probe}]}}


def test_new_kind_is_read_declared_and_prepared(echo: None) -> None:
    spec = parse_pod(pod({"echoSocket": {"port": 9, "host": "198.18.9.9"}}))
    assert spec.errors == ()
    probe = spec.containers[0].liveness
    assert probe is not None
    assert str(probe.handler) == "echo :9"
    assert spec.declared.ports == {9}
    assert [found.host for found in spec.hosts] == ["198.18.9.9"]
    (candidate,) = prober.plan(probe, ADDRESSES).candidates
    assert isinstance(candidate.target, TcpTarget)


def test_new_kind_is_offered_where_a_probe_has_none(echo: None) -> None:
    (error,) = parse_pod(pod({})).errors
    assert error.message.endswith("one of httpGet, tcpSocket, grpc, exec, echoSocket.")


def test_each_handler_has_one_kind() -> None:
    assert {kind.struct for kind in KINDS.values()} == set(definitions.Handler.__args__)
    assert handlers.kind_of(definitions.Exec(("true",))).target is None


@pytest.mark.parametrize(
    ("handler", "text"),
    [
        (definitions.HttpGet(8080, "/x"), "http :8080/x"),
        (definitions.HttpGet(443, scheme="HTTPS"), "https :443/"),
        (definitions.TcpSocket(80), "tcp :80"),
        (definitions.Grpc(1), "grpc :1"),
        (definitions.Grpc(1, "db"), "grpc :1 db"),
        (definitions.Exec(("true",)), "exec"),
    ],
)
def test_handler_has_a_text(handler: definitions.Handler, text: str) -> None:
    assert str(handler) == text


def test_guard_rejects_hosts_of_each_kind_that_has_the_field() -> None:
    guards = manifests.DIRECTORY / "guards.yaml"
    named = set(re.findall(r"h\.\?(\w+)\.\?host", guards.read_text(encoding="utf-8")))
    assert named == {name for name, kind in KINDS.items() if kind.has_host}
