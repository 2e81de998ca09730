"""A pod manifest becomes probes with the API's defaults, or errors that name the field."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from probes.spec import specs

CONTAINER = "spec.containers[0]"


def pod(container: Mapping[str, object], **spec: object) -> dict[str, object]:
    return {"spec": {"containers": [{"name": "app", **container}], **spec}}


def probed(probe: object, kind: str = "readinessProbe") -> specs.PodSpec:
    return specs.parse_pod(pod({kind: probe}))


def readiness(probe: object, **container: object) -> specs.Probe:
    parsed = specs.parse_pod(pod({"readinessProbe": probe, **container}))
    assert parsed.errors == ()
    found = parsed.containers[0].readiness
    assert found is not None
    return found


def test_defaults_are_those_of_the_api() -> None:
    assert readiness({"httpGet": {"port": 80}}) == specs.Probe(
        handler=specs.HttpGet(port=80, path="/", scheme="HTTP", headers=(), protocol="HTTP1"),
        initial_delay_seconds=0.0,
        timeout_seconds=1.0,
        period_seconds=10.0,
        success_threshold=1,
        failure_threshold=3,
        termination_grace_period_seconds=None,
    )


def test_all_fields_are_read() -> None:
    probe = readiness(
        {
            "tcpSocket": {"port": 80},
            "initialDelaySeconds": 1,
            "timeoutSeconds": 2,
            "periodSeconds": 3,
            "successThreshold": 4,
            "failureThreshold": 5,
        }
    )
    assert probe == specs.Probe(specs.TcpSocket(80), 1.0, 2.0, 3.0, 4, 5)


@pytest.mark.parametrize("field", ["timeoutSeconds", "successThreshold", "failureThreshold"])
def test_zero_means_not_given_as_in_the_api(field: str) -> None:
    assert readiness({"tcpSocket": {"port": 1}, field: 0}) == readiness({"tcpSocket": {"port": 1}})


def test_null_means_not_given() -> None:
    assert readiness({"tcpSocket": {"port": 1}, "httpGet": None, "periodSeconds": None})


@pytest.mark.parametrize(
    ("handler", "expected"),
    [
        (
            {
                "httpGet": {
                    "port": 443,
                    "scheme": "HTTPS",
                    "path": "/a?b",
                    "httpHeaders": [{"name": "X-a", "value": "1"}, {"name": "X-a", "value": "2"}],
                }
            },
            specs.HttpGet(443, "/a?b", "HTTPS", (("X-a", "1"), ("X-a", "2"))),
        ),
        ({"httpGet": {"port": 80, "path": ""}}, specs.HttpGet(80, "/")),
        ({"httpGet": {"port": 80, "host": ""}}, specs.HttpGet(80)),
        ({"httpGet": {"port": 80, "protocol": "HTTP2"}}, specs.HttpGet(80, protocol="HTTP2")),
        ({"httpGet": {"port": "web"}}, specs.HttpGet(8080)),
        ({"tcpSocket": {"port": "web"}}, specs.TcpSocket(8080)),
        ({"tcpSocket": {"port": "9090"}}, specs.TcpSocket(9090)),
        ({"grpc": {"port": 1}}, specs.Grpc(1)),
        ({"grpc": {"port": 1, "service": "s"}}, specs.Grpc(1, "s")),
        ({"grpc": {"port": 1, "mode": "TLS"}}, specs.Grpc(1, mode="TLS")),
        ({"exec": {"command": ["true"]}}, specs.Exec(("true",))),
    ],
)
def test_handlers_are_read(handler: object, expected: specs.Handler) -> None:
    ports = [{"name": "web", "containerPort": 8080}, {"name": "web", "containerPort": 1}]
    assert readiness(handler, ports=ports).handler == expected


TCP = {"tcpSocket": {"port": 1}}


@pytest.mark.parametrize(
    ("probe", "path", "words"),
    [
        ({}, "", "needs a handler"),
        ("text", "", "must be an object, not the string 'text'"),
        ({**TCP, "grpc": {"port": 1}}, "", "has 2 handlers (tcpSocket, grpc)"),
        ({"httpGet": {}}, ".httpGet.port", "is missing"),
        ({"httpGet": "x"}, ".httpGet", "must be an object"),
        ({"httpGet": {"port": 0}}, ".httpGet.port", "must be 1 to 65535"),
        ({"httpGet": {"port": 65536}}, ".httpGet.port", "must be 1 to 65535"),
        ({"httpGet": {"port": "65536"}}, ".httpGet.port", "must be 1 to 65535"),
        ({"httpGet": {"port": True}}, ".httpGet.port", "must be a number or a port name"),
        ({"httpGet": {"port": 1.5}}, ".httpGet.port", "must be a number or a port name"),
        ({"httpGet": {"port": "none"}}, ".httpGet.port", "names 'none', which is no port"),
        ({"httpGet": {"port": 1, "scheme": "http"}}, ".httpGet.scheme", "must be HTTP or HTTPS"),
        ({"httpGet": {"port": 1, "path": 1}}, ".httpGet.path", "must be a string"),
        (
            {"httpGet": {"port": 1, "httpHeaders": [{"name": "a b"}]}},
            ".httpGet.httpHeaders[0].name",
            "must be letters",
        ),
        ({"httpGet": {"port": 1, "httpHeaders": {}}}, ".httpGet.httpHeaders", "must be a list"),
        (
            {"httpGet": {"port": 1, "httpHeaders": [None]}},
            ".httpGet.httpHeaders[0]",
            "must be an object",
        ),
        (
            {"httpGet": {"port": 1, "scheme": "HTTPS", "protocol": "HTTP2"}},
            ".httpGet.protocol",
            "only with scheme HTTP",
        ),
        ({"grpc": {"port": "web"}}, ".grpc.port", "cannot use port names"),
        ({"grpc": {"port": 1, "mode": "tls"}}, ".grpc.mode", "must be Plaintext or TLS"),
        ({"exec": {"command": []}}, ".exec.command", "at least one string"),
        ({"exec": {"command": [1]}}, ".exec.command", "at least one string"),
        ({**TCP, "periodSeconds": 0}, ".periodSeconds", "must be at least 1, not 0"),
        ({**TCP, "periodSeconds": -1}, ".periodSeconds", "must be at least 1, not -1"),
        ({**TCP, "periodSeconds": 1.5}, ".periodSeconds", "must be a whole number"),
        ({**TCP, "periodSeconds": "1"}, ".periodSeconds", "must be a whole number"),
        ({**TCP, "periodSeconds": True}, ".periodSeconds", "must be a whole number"),
        ({**TCP, "periodSeconds": 2**31}, ".periodSeconds", "must be at most"),
        ({**TCP, "timeoutSeconds": -1}, ".timeoutSeconds", "must be at least 0"),
        ({**TCP, "initialDelaySeconds": -1}, ".initialDelaySeconds", "must be at least 0"),
        ({**TCP, "failureThreshold": -1}, ".failureThreshold", "must be at least 0"),
        (
            {**TCP, "terminationGracePeriodSeconds": 5},
            ".terminationGracePeriodSeconds",
            "is not allowed on a readiness probe",
        ),
    ],
)
def test_mistakes_name_their_field(probe: object, path: str, words: str) -> None:
    parsed = probed(probe)
    assert [error.path for error in parsed.errors] == [f"{CONTAINER}.readinessProbe{path}"]
    assert words in parsed.errors[0].message
    assert parsed.errors[0].message.startswith(parsed.errors[0].path)
    assert parsed.errors[0].reason == "InvalidProbe"
    assert parsed.containers[0].readiness is None


@pytest.mark.parametrize("kind", ["livenessProbe", "startupProbe"])
@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("successThreshold", 2, "must be 1 here"),
        ("terminationGracePeriodSeconds", 0, "must be at least 1"),
    ],
)
def test_liveness_and_startup_are_stricter(kind: str, field: str, value: int, words: str) -> None:
    parsed = probed({**TCP, field: value}, kind)
    assert [error.path for error in parsed.errors] == [f"{CONTAINER}.{kind}.{field}"]
    assert words in parsed.errors[0].message


def test_liveness_may_have_its_own_grace_period() -> None:
    parsed = probed({**TCP, "terminationGracePeriodSeconds": 7}, "livenessProbe")
    assert parsed.containers[0].liveness is not None
    assert parsed.containers[0].liveness.termination_grace_period_seconds == 7.0


@pytest.mark.parametrize("handler", ["httpGet", "tcpSocket"])
@pytest.mark.parametrize("host", ["127.0.0.1", "example.test"])
def test_host_is_rejected_with_its_own_reason(handler: str, host: str) -> None:
    parsed = probed({handler: {"port": 80, "host": host}})
    assert [(error.path, error.reason) for error in parsed.errors] == [
        (f"{CONTAINER}.readinessProbe.{handler}.host", "ProbeHostNotAllowed")
    ]
    assert parsed.containers[0].readiness is None


def test_all_mistakes_are_reported_and_good_probes_stay() -> None:
    parsed = specs.parse_pod(
        pod(
            {
                "readinessProbe": {**TCP, "periodSeconds": 0, "timeoutSeconds": -1},
                "livenessProbe": TCP,
                "startupProbe": {},
            }
        )
    )
    assert [error.path for error in parsed.errors] == [
        f"{CONTAINER}.startupProbe",
        f"{CONTAINER}.readinessProbe.timeoutSeconds",
        f"{CONTAINER}.readinessProbe.periodSeconds",
    ]
    assert parsed.containers == (
        specs.ContainerProbes("app", liveness=specs.Probe(specs.TcpSocket(1))),
    )


@pytest.mark.parametrize("manifest", [None, "text", 3, [], [{}]])
def test_what_is_no_object_is_no_pod(manifest: object) -> None:
    parsed = specs.parse_pod(manifest)
    assert [error.reason for error in parsed.errors] == ["InvalidPod"]
    assert parsed.errors[0].message == "the manifest is not an object."


@pytest.mark.parametrize("manifest", [{}, {"spec": None}, {"spec": {}}, {"kind": "Service"}])
def test_pod_without_containers_is_no_pod(manifest: object) -> None:
    parsed = specs.parse_pod(manifest)
    assert [(error.path, error.reason) for error in parsed.errors] == [
        ("spec.containers", "InvalidPod")
    ]


def test_container_needs_a_name_of_its_own() -> None:
    parsed = specs.parse_pod({"spec": {"containers": [{}, {"name": "a"}, {"name": "a"}]}})
    assert [error.path for error in parsed.errors] == [
        "spec.containers[0].name",
        "spec.containers[2].name",
    ]
    assert [container.name for container in parsed.containers] == ["a"]


def test_restartable_init_container_is_probed() -> None:
    sidecar = {"name": "sidecar", "restartPolicy": "Always", "readinessProbe": TCP}
    parsed = specs.parse_pod(pod({}, initContainers=[sidecar, {"name": "once"}]))
    assert parsed.errors == ()
    assert [(c.name, c.restartable_init) for c in parsed.containers] == [
        ("sidecar", True),
        ("app", False),
    ]


def test_init_container_that_runs_once_cannot_be_probed() -> None:
    parsed = specs.parse_pod(pod({}, initContainers=[{"name": "once", "livenessProbe": TCP}]))
    assert [error.path for error in parsed.errors] == ["spec.initContainers[0].livenessProbe"]


def test_host_network_is_reported() -> None:
    assert specs.parse_pod(pod({}, hostNetwork=True)).host_network


@pytest.mark.parametrize("number", [0, -1, 65536, True, "80", 80.0, None])
def test_bad_port_declaration_is_reported(number: object) -> None:
    ports = [{"containerPort": 1}, {"name": "web", "containerPort": number}]
    parsed = specs.parse_pod(pod({"ports": [*ports, {"containerPort": 65535}]}))
    assert [error.path for error in parsed.errors] == [f"{CONTAINER}.ports[1].containerPort"]
    assert [(port.name, port.number) for port in parsed.container_ports] == [("", 1), ("", 65535)]


def test_tcp_and_grpc_probes_declare_their_port() -> None:
    parsed = specs.parse_pod(pod({"readinessProbe": TCP, "livenessProbe": {"grpc": {"port": 2}}}))
    assert parsed.declared == specs.DeclaredPorts(any_port=False, ports=frozenset({1, 2}))


def test_http_probe_declares_any_port() -> None:
    assert probed({"httpGet": {"port": 80}}).declared == specs.DeclaredPorts(True, frozenset({80}))


def test_http_hook_declares_any_port() -> None:
    hook = {"lifecycle": {"preStop": {"httpGet": {"port": 81}}, "postStart": {"sleep": {}}}}
    assert specs.parse_pod(pod(hook)).declared == specs.DeclaredPorts(True, frozenset({81}))


def test_users_of_ports_are_named_by_container_and_handler() -> None:
    container = {
        "readinessProbe": TCP,
        "livenessProbe": {"grpc": {"port": 2}},
        "startupProbe": {"exec": {"command": ["true"]}},
        "lifecycle": {"preStop": {"httpGet": {"port": 81}}},
    }
    parsed = specs.parse_pod(pod(container))
    assert parsed.port_users == (
        specs.PortUser(specs.TcpSocket(1), "app", "readiness"),
        specs.PortUser(specs.Grpc(2), "app", "liveness"),
        specs.PortUser(specs.HttpGet(81), "app", "preStop"),
    )
    assert [user.is_hook for user in parsed.port_users] == [False, False, True]
    assert parsed.hooks == (specs.PodHook("app", "preStop", specs.HttpGet(81)),)


@pytest.mark.parametrize(
    ("action", "handler", "is_https_hook"),
    [
        (specs.HttpGet(443, scheme="HTTPS"), "preStop", True),
        (specs.HttpGet(443, scheme="HTTPS"), "readiness", False),
        (specs.HttpGet(80), "postStart", False),
        (specs.TcpSocket(80), "preStop", False),
    ],
)
def test_only_hooks_are_https_hooks(
    action: specs.HttpGet | specs.TcpSocket, handler: str, is_https_hook: bool
) -> None:
    assert specs.PortUser(action, "app", handler).is_https_hook is is_https_hook


def test_hook_beside_one_of_another_host_is_the_pod_s() -> None:
    other, own = {"httpGet": {"host": "b", "port": 1}}, {"httpGet": {"port": 81}}
    for first, second, name in ((other, own, "preStop"), (own, other, "postStart")):
        parsed = specs.parse_pod(pod({"lifecycle": {"postStart": first, "preStop": second}}))
        assert parsed.hooks == (specs.PodHook("app", name, specs.HttpGet(81)),)
        assert [host.host for host in parsed.hosts] == ["b"]
        assert parsed.declared == specs.DeclaredPorts(any_port=True, ports=frozenset({81}))


def test_each_host_is_named_by_container_and_handler() -> None:
    tcp, http = {"tcpSocket": {"host": "a", "port": 1}}, {"httpGet": {"host": "b", "port": "web"}}
    container = {
        "ports": [{"name": "web", "containerPort": 8080}],
        **{"startupProbe": tcp, "readinessProbe": http, "livenessProbe": tcp},
        "lifecycle": {"postStart": tcp, "preStop": http},
    }
    assert specs.parse_pod(pod(container)).hosts == (
        specs.ProbeHost("a", 1, "app", "startup"),
        specs.ProbeHost("b", 8080, "app", "readiness"),
        specs.ProbeHost("a", 1, "app", "liveness"),
        specs.ProbeHost("b", 8080, "app", "preStop"),
    )


@pytest.mark.parametrize(
    ("port", "number"),
    [
        (None, 80),
        ("web", 8080),
        ("81", 81),
        ("no", 0),
        ("\u0663", 0),
        ("65536", 0),
        (0, 0),
        (1, 1),
        (65535, 65535),
        (65536, 0),
        (True, 0),
        (1.5, 0),
    ],
)
def test_port_of_a_host_is_resolved_as_by_the_kubelet(port: object, number: int) -> None:
    container = {
        "ports": [{"name": "web", "containerPort": 8080}],
        "lifecycle": {"preStop": {"httpGet": {"host": "a", "port": port}}},
    }
    (found,) = specs.parse_pod(pod(container)).hosts
    assert found.port == number


@pytest.mark.parametrize(
    "lifecycle",
    [
        "x",
        {"preStop": "x"},
        {"preStop": {"httpGet": "x"}},
        *({"preStop": {"httpGet": {"host": host, "port": 1}}} for host in ("", 5)),
    ],
)
def test_what_is_no_hook_has_no_host(lifecycle: object) -> None:
    assert specs.parse_pod(pod({"lifecycle": lifecycle})).hosts == ()


def test_ports_of_one_name_are_those_of_all_containers() -> None:
    def container(name: str, *ports: tuple[str, int, str]) -> dict[str, object]:
        return {
            "name": name,
            "ports": [
                {"name": port, "containerPort": number, "protocol": protocol}
                for port, number, protocol in ports
            ],
        }

    parsed = specs.parse_pod(
        {
            "spec": {
                "containers": [
                    container("a", ("web", 9090, "TCP"), ("web", 53, "UDP")),
                    container("b", ("web", 8080, "TCP"), ("web", 9090, "TCP"), ("x", 1, "TCP")),
                ]
            }
        }
    )
    assert parsed.port_numbers("web", "TCP") == [8080, 9090]
    assert parsed.port_numbers("web", "UDP") == [53]
    assert parsed.port_numbers("web", "SCTP") == []


@pytest.mark.parametrize("kind", ["startupProbe", "readinessProbe", "livenessProbe"])
def test_probe_of_a_container_that_runs_once_is_rejected_by_its_name(kind: str) -> None:
    once = {"name": "once", "restartPolicy": "Never", kind: TCP, "ports": [{"containerPort": 1}]}
    parsed = specs.parse_pod(pod({}, initContainers=[once]))
    path = f"spec.initContainers[0].{kind}"
    text = "is not allowed on an init container without restartPolicy: Always"
    assert parsed.errors == (specs.FieldProblem(path, "InvalidProbe", f"{path} {text}."),)
    assert [container.name for container in parsed.containers] == ["app"]
    assert (parsed.named_ports, parsed.container_ports) == ({"app": {}}, ())


def test_hook_with_a_host_is_the_kubelets_alone() -> None:
    hook = {"preStop": {"httpGet": {"host": "127.0.0.1", "port": 9879}}}
    container = {"name": "app", "lifecycle": hook, "readinessProbe": {"tcpSocket": {"port": 80}}}
    spec = specs.parse_pod({"spec": {"containers": [container]}})
    assert spec.errors == ()
    assert spec.hooks == ()
    assert spec.declared.ports == {80}
    assert [(one.host, one.handler) for one in spec.hosts] == [("127.0.0.1", "preStop")]


def test_hooks_of_other_kinds_are_not_podgates() -> None:
    """The kubelet supports no tcpSocket hook, though the API takes one; exec and sleep are its."""
    hooks = {
        "postStart": {"tcpSocket": {"port": 80, "host": "x"}},
        "preStop": {"exec": {"command": ["true"]}},
    }
    parsed = specs.parse_pod(pod({"lifecycle": hooks}))
    assert (parsed.declared, parsed.errors) == (specs.DeclaredPorts(), ())


def test_exec_and_rejected_probes_declare_nothing() -> None:
    parsed = specs.parse_pod(
        pod(
            {
                "livenessProbe": {"exec": {"command": ["true"]}},
                "readinessProbe": {"httpGet": {"port": 80, "host": "x"}},
            }
        )
    )
    assert parsed.declared == specs.DeclaredPorts()


KEYS = st.sampled_from(
    [
        *("spec", "containers", "initContainers", "name", "ports", "containerPort"),
        *("readinessProbe", "livenessProbe", "lifecycle", "preStop"),
        *("httpGet", "tcpSocket", "grpc", "exec", "command"),
        *("port", "host", "path", "scheme", "httpHeaders", "value"),
        *("periodSeconds", "timeoutSeconds", "successThreshold", "terminationGracePeriodSeconds"),
    ]
)
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
TREES = st.recursive(
    LEAVES, lambda inner: st.lists(inner) | st.dictionaries(KEYS | st.integers(), inner)
)


@given(TREES, TREES)
def test_no_manifest_makes_the_parser_raise(tree: object, probe: object) -> None:
    specs.parse_pod(tree)
    parsed = specs.parse_pod(pod({"readinessProbe": probe, "ports": tree}))
    for error in parsed.errors:
        assert error.message.startswith(error.path)
        assert error.message.endswith(".")
        assert "\n" not in error.message


def test_a_number_too_long_to_print_is_reported() -> None:
    assert len(probed({**TCP, "periodSeconds": 10**5000}).errors) == 1


@pytest.mark.parametrize(("scheme", "port"), [("HTTP", 80), ("HTTPS", 443)])
def test_hook_without_a_port_has_the_schemes(scheme: str, port: int) -> None:
    parsed = specs.parse_pod(pod({"lifecycle": {"preStop": {"httpGet": {"scheme": scheme}}}}))
    assert parsed.errors == ()
    assert parsed.declared.ports == {port}


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (["a", "a"], "spec.containers[1].name is used twice"),
        (["a", ""], "spec.containers[1].name is missing"),
    ],
)
def test_containers_need_names_of_their_own(names: list[str], problem: str) -> None:
    spec = specs.parse_pod({"spec": {"containers": [{"name": name} for name in names]}})
    assert [error.message for error in spec.errors] == [f"{problem}."]
