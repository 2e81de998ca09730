"""A second agent on the same node, for tests of the handover."""

import os
import pathlib

from agent.lab.agent_process import AgentProcess

_LIMIT_SECONDS = 60 * float(os.environ.get("PODGATE_TEST_PATIENCE", "1"))


class SecondAgent(AgentProcess):
    """Another agent with the first one's pods and directories."""

    def __init__(self, first: AgentProcess, directory: pathlib.Path) -> None:
        directory.mkdir()
        super().__init__(directory, first.bpffs)
        self.pods_from = ("--manifests", str(first.manifests))
        self.kubelet = first.kubelet
        self.run_directory = first.run_directory
        self.started_file = directory / "started"

    def start_standby(self, *extra: str, seconds: float = _LIMIT_SECONDS) -> None:
        """Start it as the standby of the first one; `started_file` exists once it waits."""
        self.start(
            *("--standby-seconds", str(seconds)),
            *("--started-file", str(self.started_file)),
            *extra,
        )

    def wait(self) -> int:
        """Wait until it exits by itself. Returns its exit status."""
        assert self._process is not None
        return self._process.wait(_LIMIT_SECONDS)

    def has_logged(self, text: str) -> bool:
        return text in self.log.read_text(encoding="utf-8")
