"""Keeps podgate-cni's state file up to date with the modes of node and namespaces."""

import asyncio
import pathlib

import structlog

from agent.cni import state
from agent.logs import Event
from agent.pods.pod_modes import NODE, NewPodModes, PodModes
from bpf.attachment import Attachment

log = structlog.get_logger(__name__)

# Many namespaces that change together are one write of up to 750 KiB.
_SETTLE_SECONDS = 0.2
_RETRY_SECONDS = 10.0


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

    def open(self) -> None:
        """Write it for this agent's programs, once they are pinned. Blocks; raises `OSError`."""
        self._previous = state.read(self._run_directory)
        self._changes.take()
        state.publish(self._run_directory, self._desired(), self._attachment)

    async def run(self) -> None:
        """Write each change until cancelled."""
        while True:
            await self._changes.wait()
            await asyncio.sleep(_SETTLE_SECONDS)
            self._changes.take()
            desired = self._desired()
            if len(desired.namespaces) > state.MAX_NAMESPACES:
                log.warning(Event.CNI_STATE_TRUNCATED, namespaces=len(desired.namespaces))
            try:
                await asyncio.to_thread(
                    state.publish, self._run_directory, desired, self._attachment
                )
            except OSError as error:
                log.error(Event.CNI_STATE_NOT_WRITTEN, error=str(error))
                await asyncio.sleep(_RETRY_SECONDS)
                self._changes.mark(NODE)

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
