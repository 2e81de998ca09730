"""A second agent on the same node, for tests of the handover."""

import pathlib

from agent.lab.agent_process import AgentProcess
from tests.polling import PATIENCE

_LIMIT_SECONDS = 60 * PATIENCE


class SecondAgent(AgentProcess):
    """Another agent with the first one's pods and directories."""

    def __init__(self, first: AgentProcess, directory: pathlib.Path) -> None:
        directory.mkdir()
        super().__init__(directory, first.bpffs, first.launch)
        self.pods_from = ("--manifests", str(first.manifests))
        self.kubelet = first.kubelet
        self.run_directory = first.run_directory
        self.pod_directory = directory / "pod"
        self.pod_directory.mkdir()

    @property
    def is_ready(self) -> bool:
        """The result of a probe of its pod."""
        return (self.pod_directory / "ready").exists()

    def start_standby(
        self, *extra: str, version: pathlib.Path | None = None, seconds: float = _LIMIT_SECONDS
    ) -> None:
        """Start it as the pod that replaces the first one's. version: a directory of packages."""
        self.start_in(
            version,
            *("--standby-seconds", str(seconds)),
            *("--pod-directory", str(self.pod_directory)),
            *extra,
        )

    def wait(self) -> int:
        """Wait until it exits by itself. Returns its exit status."""
        assert self._process is not None
        return self._process.wait(_LIMIT_SECONDS)

    def has_logged(self, text: str) -> bool:
        return text in self.log.read_text(encoding="utf-8")
