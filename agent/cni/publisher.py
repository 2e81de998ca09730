"""Keeps podgate-cni's state file up to date with the modes of node and namespaces."""

import asyncio
import pathlib

import structlog

from agent.cni import state
from agent.logs import Event
from agent.pods.pod_modes import NODE, NewPodModes, PodModes
from bpf.attachment import Attachment
from bpf.verdicts import Mode

log = structlog.get_logger(__name__)

# Many namespaces that change together are one write of up to 750 KiB.
_SETTLE_SECONDS = 0.2
_RETRY_SECONDS = 10.0
# An agent lists labels within a second of its start. A node that cannot reach its API server has
# static pods only, and one of these may be what it needs to reach it.
_LABELS_SECONDS = 60.0


class CniStatePublisher:
    """Writes the file when the agent starts, and whenever a mode of new pods changes."""

    def __init__(
        self, run_directory: pathlib.Path, attachment: Attachment, modes: PodModes
    ) -> None:
        self._run_directory = run_directory
        self._attachment = attachment
        self._modes = modes
        self._changes = modes.changes.subscribe()
        self._previous: NewPodModes | None = None
        """The modes in the file of the previous agent."""
        self._problem = ""

    def open(self) -> None:
        """Write it for this agent's programs, once they are pinned. Blocks; `run` repeats what
        fails.

        After a reboot not before the labels are read, if these may be stricter than the default:
        without the file, new pods wait if they have to (`strictStart`).
        """
        self._previous = state.read(self._run_directory)
        self._changes.take()
        if not self._is_waiting and not self._publish(self._desired()):
            self._changes.mark(NODE)

    async def run(self) -> None:
        """Write each change until cancelled."""
        if self._is_waiting:
            await self._wait_for_labels()
            self._changes.mark(NODE)
        while True:
            await self._changes.wait()
            await asyncio.sleep(_SETTLE_SECONDS)
            self._changes.take()
            desired = self._desired()
            if len(desired.namespaces) > state.MAX_NAMESPACES:
                log.warning(Event.CNI_STATE_TRUNCATED, namespaces=len(desired.namespaces))
            if not await asyncio.to_thread(self._publish, desired):
                await asyncio.sleep(_RETRY_SECONDS)
                self._changes.mark(NODE)

    def _publish(self, desired: NewPodModes) -> bool:
        """Whether the file is written; the same error is logged once. Blocks."""
        problem = ""
        try:
            state.publish(self._run_directory, desired, self._attachment)
        except OSError as error:
            problem = str(error)
            if problem != self._problem:
                log.error(Event.CNI_STATE_NOT_WRITTEN, error=problem)
        self._problem = problem
        return not problem

    @property
    def _is_waiting(self) -> bool:
        """Whether labels are unknown, and the strictest mode of a new pod with them."""
        own = self._modes.of_new_pods.default
        may_be_stricter = own < Mode.ENFORCE <= self._modes.node.ceiling
        return may_be_stricter and self._previous is None and not self._modes.is_complete

    async def _wait_for_labels(self) -> None:
        try:
            async with asyncio.timeout(_LABELS_SECONDS):
                while self._is_waiting:
                    await self._changes.wait()
                    self._changes.take()
        except TimeoutError:
            log.warning(Event.CNI_LABELS_UNKNOWN)

    def _desired(self) -> NewPodModes:
        """While labels are unknown, those of the previous agent, which may be stricter."""
        own, previous = self._modes.of_new_pods, self._previous
        if self._modes.is_complete or previous is None:
            return own
        ceiling = self._modes.node.ceiling
        return NewPodModes(
            min(max(own.default, previous.default), ceiling),
            {name: min(mode, ceiling) for name, mode in previous.namespaces.items()}
            | own.namespaces,
        )
