"""What the plugin answers to the runtime, and to one that does not behave."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.nri import mux, nri_pb2, ttrpc, ttrpc_pb2
from agent.nri.plugin import (
    Connected,
    Ended,
    NewPod,
    NriError,
    PluginProtocol,
    Synchronizing,
)
from agent.nri.ttrpc import Call, Response
from tests.agent.nri import runtime


def sent(plugin: PluginProtocol) -> list[Call | Response]:
    return runtime.Reader().feed(plugin.data_to_send())


def registered() -> PluginProtocol:
    plugin = PluginProtocol()
    plugin.register()
    plugin.receive(runtime.REGISTERED + runtime.configure(1))
    plugin.data_to_send()
    return plugin


def test_plugin_registers_first_with_its_name_and_place() -> None:
    plugin = PluginProtocol()
    plugin.register()
    (call,) = sent(plugin)
    assert isinstance(call, Call)
    assert (call.service, call.method) == ("nri.pkg.api.v1alpha1.Runtime", "RegisterPlugin")
    found = nri_pb2.RegisterPluginRequest.FromString(call.payload)
    assert (found.plugin_name, found.plugin_idx) == ("podgate", "90")


def test_plugin_subscribes_to_the_start_of_pods_alone() -> None:
    plugin = PluginProtocol()
    assert plugin.receive(runtime.configure(1, milliseconds=500)) == [
        Connected("containerd 2.4.0", 0.5)
    ]
    (response,) = sent(plugin)
    assert isinstance(response, Response)
    assert nri_pb2.ConfigureResponse.FromString(response.payload).events == 1


@pytest.mark.parametrize(("milliseconds", "seconds"), [(0, 2.0), (-1, 2.0), (1, 0.001)])
def test_runtime_that_reports_no_limit_has_the_default_one(
    milliseconds: int, seconds: float
) -> None:
    plugin = PluginProtocol()
    (connected,) = plugin.receive(runtime.configure(1, milliseconds=milliseconds))
    assert connected == Connected("containerd 2.4.0", seconds)


@pytest.mark.parametrize(
    ("name", "version", "runtime_name"),
    [("cri-o", "1.36", "cri-o 1.36"), ("cri-o", "", "cri-o"), ("", "", "")],
)
def test_runtime_is_named_as_far_as_it_names_itself(
    name: str, version: str, runtime_name: str
) -> None:
    request = nri_pb2.ConfigureRequest(runtime_name=name, runtime_version=version)
    content = runtime.call(1, "Configure", request.SerializeToString())
    assert PluginProtocol().receive(content) == [Connected(runtime_name, 2.0)]


@pytest.mark.parametrize(("nanoseconds", "seconds"), [(500_000_000, 0.5), (9_000_000_000, 2.0)])
def test_shorter_limit_of_one_call_counts(nanoseconds: int, seconds: float) -> None:
    payload = nri_pb2.RunPodSandboxRequest(pod=runtime.pod()).SerializeToString()
    request = ttrpc_pb2.Request(
        service=runtime.PLUGIN, method="RunPodSandbox", payload=payload, timeout_nano=nanoseconds
    ).SerializeToString()
    message = struct.pack("!IIBB", len(request), 5, 1, 1) + request
    (new,) = registered().receive(mux.frames(mux.PLUGIN_SERVICE, message))
    assert isinstance(new, NewPod)
    assert new.timeout_seconds == seconds


def test_any_number_of_pods_may_start_one_after_the_other_and_64_at_a_time() -> None:
    plugin = registered()
    for number in range(1, 200, 2):
        (new,) = plugin.receive(runtime.run_pod(number, runtime.pod()))
        assert isinstance(new, NewPod)
        plugin.accept(new)
    at_once = b"".join(runtime.run_pod(number, runtime.pod()) for number in range(201, 329, 2))
    assert len(plugin.receive(at_once)) == 64
    with pytest.raises(NriError, match="more than 64"):
        plugin.receive(runtime.run_pod(329, runtime.pod()))


def test_pods_are_answered_in_any_order_and_only_when_they_are_accepted() -> None:
    plugin = registered()
    received = runtime.run_pod(5, runtime.pod("a")) + runtime.run_pod(7, runtime.pod("b"))
    first, second = plugin.receive(received)
    assert plugin.data_to_send() == b""
    assert isinstance(first, NewPod)
    assert isinstance(second, NewPod)
    plugin.accept(second)
    plugin.accept(first)
    assert sent(plugin) == [Response(7, 0, "", b""), Response(5, 0, "", b"")]


@pytest.mark.parametrize("older", [False, True], ids=["RunPodSandbox", "StateChange"])
def test_new_pod_is_read_with_its_namespace(older: bool) -> None:
    started = runtime.pod("web", netns="/run/netns/web")
    started.ips.append("no address")
    content = runtime.run_pod(5, started)
    if older:
        change = nri_pb2.StateChangeEvent(event=nri_pb2.RUN_POD_SANDBOX, pod=started)
        content = runtime.call(5, "StateChange", change.SerializeToString())
    (new,) = registered().receive(content)
    assert isinstance(new, NewPod)
    assert new.sandbox is not None
    assert new.sandbox.netns_path == "/run/netns/web"
    sandbox = new.sandbox.sandbox
    assert (sandbox.id, sandbox.pod_uid, sandbox.full_name) == ("id-web", "uid-web", "demo/web")
    assert [str(address) for address in sandbox.ips] == ["198.18.0.9"]
    assert new.timeout_seconds == 2.0


def test_pod_of_the_hosts_network_has_no_sandbox_to_gate() -> None:
    (new,) = registered().receive(runtime.run_pod(5, runtime.pod(netns="")))
    assert isinstance(new, NewPod)
    assert new.sandbox is None


def test_each_part_of_a_long_list_is_answered() -> None:
    plugin = registered()
    request = nri_pb2.SynchronizeRequest(more=True).SerializeToString()
    # With a container, which podgate does not read: field 2.
    received = runtime.call(5, "Synchronize", request + b"\x12\x04\x0a\x02id")
    (synchronizing,) = plugin.receive(received)
    assert isinstance(synchronizing, Synchronizing)
    assert synchronizing.timeout_seconds == 2.0
    plugin.accept(synchronizing)
    (response,) = sent(plugin)
    assert isinstance(response, Response)
    assert nri_pb2.SynchronizeResponse.FromString(response.payload).more
    assert not synchronizing.is_last
    (last,) = plugin.receive(runtime.call(7, "Synchronize"))
    assert last == Synchronizing(7, b"", is_last=True, timeout_seconds=2.0)


def test_other_events_of_pods_are_answered_at_once() -> None:
    plugin = registered()
    change = nri_pb2.StateChangeEvent(event=2).SerializeToString()  # type: ignore[arg-type]
    assert plugin.receive(runtime.call(5, "StateChange", change)) == []
    assert sent(plugin) == [Response(5, 0, "", b"")]


@pytest.mark.parametrize("service", [runtime.PLUGIN, "other.Service"])
def test_unknown_call_is_unimplemented(service: str) -> None:
    plugin = registered()
    plugin.receive(runtime.call(5, "Novelty", service=service))
    message = f"podgate has no {service}/Novelty"
    assert sent(plugin) == [Response(5, ttrpc.UNIMPLEMENTED, message, b"")]


def test_end_of_the_runtime_is_reported() -> None:
    plugin = registered()
    assert plugin.receive(runtime.call(5, "Shutdown")) == [Ended()]
    assert sent(plugin) == [Response(5, 0, "", b"")]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (
            mux.frames(2, ttrpc.response(1, b"", code=2, message="no such index")),
            "rejects the plugin: no such index",
        ),
        (mux.frames(2, ttrpc.request(1, "s", "m", b"")), "it calls where it is to respond"),
        (mux.frames(1, ttrpc.response(1, b"")), "it responds where it is to call"),
        (runtime.call(5, "RunPodSandbox", b"\x0a\x05ab"), "it does not speak NRI"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "it does not speak NRI: a frame of 791752241"),
        (
            b"".join(runtime.run_pod(n, runtime.pod()) for n in range(1, 200, 2)),
            "more than 64 pods at a time",
        ),
    ],
)
def test_runtime_that_does_not_behave_is_an_error(content: bytes, reason: str) -> None:
    plugin = PluginProtocol()
    plugin.register()
    with pytest.raises(NriError, match=reason):
        plugin.receive(content)


METHODS = st.sampled_from(
    ["Configure", "Synchronize", "RunPodSandbox", "StateChange", "Shutdown", "Other"]
)


@given(calls=st.lists(st.tuples(METHODS, st.binary(max_size=60)), max_size=5))
def test_any_content_of_calls_is_answered_or_an_error(calls: list[tuple[str, bytes]]) -> None:
    plugin = registered()
    answered = 0
    for number, (method, payload) in enumerate(calls):
        try:
            happened = plugin.receive(runtime.call(number, method, payload))
        except NriError:
            return
        for one in happened:
            if isinstance(one, NewPod | Synchronizing):
                plugin.accept(one)
        answered += len(sent(plugin))
    assert answered == len(calls)
