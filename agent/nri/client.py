"""The connection to the runtime's NRI socket, and the pods that start by it.

The runtime calls for one pod at a time and waits for the answer, so what is done there is what has
to precede the first container. It is answered before the runtime's limit whatever happens: a plugin
that is late is closed, and the pods until it has connected again start without it.
"""

import asyncio
import os
import pathlib
import random
from collections.abc import Awaitable, Callable, Iterator

import structlog
from prometheus_client import core

from agent import backoff
from agent.cri import sandbox_netns
from agent.cri.models import NetworkedSandbox
from agent.errors import EXHAUSTED
from agent.logs import Event
from agent.metrics import MetricFamily, counter, histogram
from agent.nri.plugin import Connected, NewPod, NriError, PluginProtocol, Synchronizing
from agent.settings import NRI_SOCKET

log = structlog.get_logger(__name__)

Gate = Callable[[NetworkedSandbox], Awaitable[bool]]
"""Gates a sandbox; whether it has its gate then, or on purpose none. It may be cancelled."""
Correct = Callable[[str | None], Awaitable[None]]
"""Corrects the conditions of a pod, by uid, that are about another sandbox; None: of all pods of
which no container runs. It may be cancelled."""

PODS = MetricFamily(
    "podgate_nri_pods_total",
    "counter",
    "Pods that the container runtime started through NRI, by result: gated (before the first "
    "container), late (the gate was not in force in time, and the pod started without waiting on), "
    "none (a pod without a network of its own).",
    ("result",),
)
SECONDS = MetricFamily(
    "podgate_nri_seconds",
    "histogram",
    "Time for which the container runtime waited for podgate at the start of a pod.",
)
_RESULTS = ("gated", "late", "none")
_BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)

# Of the time that the runtime waits. The rest is for an event loop that is held up on a busy node:
# a late answer costs one pod its gate for some milliseconds, mostly before its container exists;
# a runtime that closes starts all pods of its queue at once. Of 600 waits of a loop beside a load
# of 90 on two processors, 40 were longer than 0.5 s and 11 than 1 s.
_SHARE = 0.5
_CONNECT_SECONDS = 5.0
# An agent corrects conditions a second after its first gates. If that part fails, no pod is to wait
# for it again and again.
_START_SECONDS = 10.0
# The runtime's own limit for a registration (DefaultPluginRegistrationTimeout); a busy one waits
# for pods that are being made before it registers a plugin.
_REGISTRATION_SECONDS = 30.0
_CHUNK_BYTES = 1 << 16
_FIRST_RETRY_SECONDS, _MAX_RETRY_SECONDS = 0.1, 10.0
# While the socket is missing or nothing listens on it: a runtime that restarts starts pods soon.
_MAX_ABSENT_SECONDS = 1.0
# A connection that was open for this long was a good one.
_HEALTHY_SECONDS = 30.0


class NriClient:
    """Registers at the runtime whenever its socket exists. For the event loop."""

    def __init__(
        self,
        socket: pathlib.Path = NRI_SOCKET,
        *,
        gate: Gate,
        are_gated: asyncio.Event,
        jitter: backoff.Jitter = random.random,
    ) -> None:
        """are_gated: set once pods that existed before have their gates."""
        self._gate = gate
        self._are_gated = are_gated
        self._correct: Correct | None = None
        self._can_correct = asyncio.Event()
        self._waits_until = asyncio.get_running_loop().time() + _START_SECONDS
        self.runtime = ""
        """Name and version of the runtime that calls; empty while none does."""
        self.problem = ""
        """Why it does not, in one sentence; empty also where the runtime has no NRI."""
        self.has_socket = False
        """Whether the runtime has NRI, or had it when it was last tried."""
        self._socket = socket
        self._configured: Connected | None = None
        self._pods = counter(PODS)
        for result in _RESULTS:
            self._pods.labels(result)
        self._seconds = histogram(SECONDS, _BUCKETS)
        self._backoff = backoff.Backoff(
            base_seconds=_FIRST_RETRY_SECONDS, cap_seconds=_MAX_RETRY_SECONDS, jitter=jitter
        )

    def collect(self) -> Iterator[core.Metric]:
        yield from self._pods.collect()
        yield from self._seconds.collect()

    def set_correction(self, correct: Correct) -> None:
        """What follows the gate. It comes later than the first gates: an agent that has just
        started is waited for, since a reboot may have preceded it."""
        self._correct = correct
        self._can_correct.set()

    @property
    def is_connected(self) -> bool:
        """Whether the runtime calls podgate for each new pod."""
        return bool(self.runtime)

    async def run(self) -> None:
        """Be the runtime's plugin until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            started = loop.time()
            longest_seconds = _MAX_RETRY_SECONDS
            try:
                await self._connect()
            except (NriError, OSError, TimeoutError) as error:
                if isinstance(error, OSError) and error.errno in EXHAUSTED:
                    raise
                if isinstance(error, FileNotFoundError | ConnectionRefusedError):
                    longest_seconds = _MAX_ABSENT_SECONDS
                self._lose(error)
            if loop.time() - started >= _HEALTHY_SECONDS:
                self._backoff.reset()
            await asyncio.sleep(min(self._backoff.next_seconds(), longest_seconds))

    async def _connect(self) -> None:
        """Raises `NriError`, `OSError` or `TimeoutError` when the connection ends."""
        async with asyncio.timeout(_CONNECT_SECONDS):
            reader, writer = await asyncio.open_unix_connection(str(self._socket))
        self.has_socket = True
        try:
            await self._serve(reader, writer)
        finally:
            self.runtime, self._configured = "", None
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        protocol = PluginProtocol()
        protocol.register()
        starting: set[asyncio.Task[None]] = set()
        try:
            async with asyncio.timeout(_REGISTRATION_SECONDS) as limit:
                while True:
                    writer.write(protocol.data_to_send())
                    await self._drain(writer)
                    received = await reader.read(_CHUNK_BYTES)
                    if not received:
                        raise NriError("it has closed the connection")
                    for happened in protocol.receive(received):
                        if isinstance(happened, NewPod | Synchronizing):
                            task = asyncio.create_task(
                                self._start(happened, protocol, writer), name="pod of NRI"
                            )
                            starting.add(task)
                            task.add_done_callback(starting.discard)
                        elif isinstance(happened, Connected):
                            limit.reschedule(None)
                            self._configured = happened
                        else:
                            log.info(Event.NRI_SHUT_DOWN, runtime=self.runtime)
        finally:
            for task in starting:
                task.cancel()
            await asyncio.gather(*starting, return_exceptions=True)

    async def _start(
        self,
        waiting: NewPod | Synchronizing,
        protocol: PluginProtocol,
        writer: asyncio.StreamWriter,
    ) -> None:
        """Do what precedes the answer, and answer whatever its outcome is."""
        try:
            if isinstance(waiting, NewPod):
                await self._prepare(waiting)
            else:
                async with asyncio.timeout(waiting.timeout_seconds * _SHARE):
                    await self._are_gated.wait()
                    await self._correct_conditions(None)
        except TimeoutError:
            pass
        except Exception as error:
            log.warning(Event.NRI_SYNCHRONIZATION_FAILED, error=f"{type(error).__name__}: {error}")
        finally:
            protocol.accept(waiting)
            if isinstance(waiting, Synchronizing) and waiting.is_last:
                self._set_connected()
            if not writer.is_closing():
                writer.write(protocol.data_to_send())

    @staticmethod
    async def _drain(writer: asyncio.StreamWriter) -> None:
        """A runtime that does not read is not one to wait for."""
        async with asyncio.timeout(_CONNECT_SECONDS):
            await writer.drain()

    def _set_connected(self) -> None:
        if (found := self._configured) is None or self.runtime:
            return
        self.runtime, self.problem = found.runtime or "a container runtime", ""
        log.info(
            Event.NRI_CONNECTED,
            runtime=self.runtime,
            socket=str(self._socket),
            timeout_seconds=found.timeout_seconds,
        )

    def _lose(self, error: Exception) -> None:
        if isinstance(error, FileNotFoundError):
            # Where the runtime has no NRI, or had it and restarts without.
            self.has_socket = False
            problem = ""
        elif isinstance(error, NriError):
            problem = f"The container runtime at {self._socket} does not call podgate: {error}."
        else:
            reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else ""
            reason = reason or str(error) or "no response"
            problem = f"NRI at {self._socket} does not respond: {reason}."
        if problem and problem != self.problem:
            log.warning(Event.NRI_DISCONNECTED, problem=problem)
        self.problem = problem

    async def _correct_conditions(self, uid: str | None) -> None:
        if asyncio.get_running_loop().time() < self._waits_until:
            await self._can_correct.wait()
        if self._correct:
            await self._correct(uid)

    async def _prepare(self, pod: NewPod) -> None:
        """Gate the pod and correct its conditions, as far as there is time."""
        if pod.sandbox is None or sandbox_netns.is_of_host(pod.sandbox.netns_path):
            self._pods.labels("none").inc()
            return
        loop = asyncio.get_running_loop()
        started = loop.time()
        is_gated = False
        problem = "its gate was not in force in time"
        try:
            async with asyncio.timeout(pod.timeout_seconds * _SHARE):
                is_gated = await self._gate(pod.sandbox)
                if not is_gated:
                    problem = "it cannot be gated now; its condition has the reason"
                await self._correct_conditions(pod.sandbox.sandbox.pod_uid)
        except TimeoutError:
            pass
        except Exception as error:
            # Whatever it is, the pod must not wait for it.
            problem = f"{type(error).__name__}: {error}"
        seconds = loop.time() - started
        self._seconds.observe(seconds)
        self._pods.labels("gated" if is_gated else "late").inc()
        if not is_gated:
            log.warning(
                Event.NRI_GATE_LATE,
                pod=pod.sandbox.sandbox.full_name,
                sandbox=pod.sandbox.sandbox.id,
                seconds=round(seconds, 3),
                problem=problem,
            )
