"""The plugin's side of NRI as bytes: registration, and what it answers. No sockets, no clock.

`PluginProtocol` answers everything itself but what has to wait: the start of a pod (`NewPod`) and
the end of its own registration (`Synchronizing`). Its user answers these with `accept`, in any
order.
Nothing that podgate answers to a pod's start is an error, which would keep the pod from starting.
"""

import dataclasses
from collections.abc import Iterator

from google.protobuf.message import DecodeError

from agent.cri.models import NetworkedSandbox
from agent.nri import mux, nri_pb2, pods, ttrpc
from agent.nri.mux import Demultiplexer
from agent.nri.ttrpc import Call, MessageReader, Response

NAME = "podgate"
"""The plugin's name; with it an owner requires podgate in an annotation of a pod."""
INDEX = "90"
"""Late among the plugins: those before may reject the pod, or change its network."""

DEFAULT_TIMEOUT_SECONDS = 2.0
"""NRI's own, for runtimes that do not report it (DefaultPluginRequestTimeout)."""

_PACKAGE = "nri.pkg.api.v1alpha1"
_PLUGIN = f"{_PACKAGE}.Plugin"
_RUNTIME = f"{_PACKAGE}.Runtime"
_REGISTRATION = 1
_EVENTS = 1 << (nri_pb2.RUN_POD_SANDBOX - 1)
# The runtime makes one call at a time; more of them are a fault.
_MAX_OPEN_CALLS = 64


class NriError(Exception):
    """The runtime does not speak NRI, or rejects the plugin. The text completes a sentence."""


@dataclasses.dataclass(frozen=True, slots=True)
class NewPod:
    """A pod that starts when it is accepted. timeout_seconds: how long the runtime waits;
    sandbox: None for a pod without a network namespace, as containerd reports a pod of the host
    network, or not of Kubernetes."""

    number: int
    sandbox: NetworkedSandbox | None
    timeout_seconds: float


@dataclasses.dataclass(frozen=True, slots=True)
class Synchronizing:
    """The runtime has pods, which it reports now; it calls the plugin for new ones, and counts it
    as there, once the last part is accepted. timeout_seconds: how long the runtime waits."""

    number: int
    payload: bytes
    is_last: bool
    timeout_seconds: float


@dataclasses.dataclass(frozen=True, slots=True)
class Connected:
    """The runtime has configured the plugin. runtime: name and version."""

    runtime: str
    timeout_seconds: float


@dataclasses.dataclass(frozen=True, slots=True)
class Ended:
    """The runtime is about to end."""


Happening = NewPod | Synchronizing | Connected | Ended


class PluginProtocol:
    """One connection."""

    def __init__(self) -> None:
        self._trunk = Demultiplexer()
        self._calls = MessageReader()
        self._responses = MessageReader()
        self._timeout_seconds = DEFAULT_TIMEOUT_SECONDS
        self._open: set[int] = set()
        self._to_send = bytearray()

    def register(self) -> None:
        """Register the plugin; the first thing to do."""
        content = nri_pb2.RegisterPluginRequest(plugin_name=NAME, plugin_idx=INDEX)
        message = ttrpc.request(
            _REGISTRATION, _RUNTIME, "RegisterPlugin", content.SerializeToString()
        )
        self._to_send += mux.frames(mux.RUNTIME_SERVICE, message)

    def data_to_send(self) -> bytes:
        """What is to be sent since the last time."""
        content = bytes(self._to_send)
        self._to_send.clear()
        return content

    def receive(self, received: bytes) -> list[Happening]:
        """What follows from bytes of the runtime. Raises `NriError`."""
        happened: list[Happening] = []
        try:
            for stream, content in self._trunk.feed(received):
                if stream == mux.PLUGIN_SERVICE:
                    for message in self._calls.feed(content):
                        if isinstance(message, Response):
                            raise NriError("it responds where it is to call")
                        happened += self._handle(message)
                elif stream == mux.RUNTIME_SERVICE:
                    for message in self._responses.feed(content):
                        self._check_registered(message)
        except (mux.MuxError, ttrpc.TtrpcError, DecodeError) as error:
            raise NriError(f"it does not speak NRI: {error}") from error
        return happened

    def accept(self, waiting: NewPod | Synchronizing) -> None:
        """Let the pod start, or the runtime end the registration."""
        self._open.discard(waiting.number)
        payload = waiting.payload if isinstance(waiting, Synchronizing) else b""
        self._respond(waiting.number, payload)

    def _handle(self, call: Call) -> Iterator[Happening]:
        method = call.method if call.service == _PLUGIN else ""
        if method == "Configure":
            yield self._configure(call)
        elif method == "Synchronize":
            yield self._synchronize(call)
        elif method == "RunPodSandbox":
            yield self._new_pod(call, nri_pb2.RunPodSandboxRequest.FromString(call.payload).pod)
        elif method == "StateChange":
            change = nri_pb2.StateChangeEvent.FromString(call.payload)
            if change.event == nri_pb2.RUN_POD_SANDBOX:
                yield self._new_pod(call, change.pod)
            else:
                self._respond(call.number, b"")
        elif method == "Shutdown":
            self._respond(call.number, b"")
            yield Ended()
        else:
            message = ttrpc.response(
                call.number,
                b"",
                code=ttrpc.UNIMPLEMENTED,
                message=f"podgate has no {call.service}/{call.method}",
            )
            self._to_send += mux.frames(mux.PLUGIN_SERVICE, message)

    def _configure(self, call: Call) -> Connected:
        request = nri_pb2.ConfigureRequest.FromString(call.payload)
        if request.request_timeout > 0:
            self._timeout_seconds = request.request_timeout / 1000
        answer = nri_pb2.ConfigureResponse(events=_EVENTS)
        self._respond(call.number, answer.SerializeToString())
        runtime = f"{request.runtime_name} {request.runtime_version}".strip()
        return Connected(runtime, self._timeout_seconds)

    def _synchronize(self, call: Call) -> Synchronizing:
        """Sandboxes that exist are in the runtime's list, which podgate reads."""
        more = nri_pb2.SynchronizeRequest.FromString(call.payload).more
        answer = nri_pb2.SynchronizeResponse(more=more).SerializeToString()
        return Synchronizing(call.number, answer, not more, self._limit(call))

    def _new_pod(self, call: Call, pod: nri_pb2.PodSandbox) -> NewPod:
        return NewPod(call.number, pods.read(pod), self._limit(call))

    def _limit(self, call: Call) -> float:
        """How long the runtime waits for the answer, in seconds."""
        self._open.add(call.number)
        if len(self._open) > _MAX_OPEN_CALLS:
            raise NriError(f"it starts more than {_MAX_OPEN_CALLS} pods at a time")
        limits = (self._timeout_seconds, call.timeout_seconds)
        return min(limit for limit in limits if limit is not None)

    def _respond(self, number: int, payload: bytes) -> None:
        self._to_send += mux.frames(mux.PLUGIN_SERVICE, ttrpc.response(number, payload))

    def _check_registered(self, message: Call | Response) -> None:
        if isinstance(message, Call):
            raise NriError("it calls where it is to respond")
        if message.code != ttrpc.OK:
            raise NriError(f"it rejects the plugin: {message.message}")
