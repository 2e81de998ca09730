"""`kubectl podgate` with a real kubectl."""

import shutil
from typing import Any

import pytest
import yaml

from agent.operate.kubectl import main
from tests.cluster.control_plane import ControlPlane
from tests.cluster.workloads import Workloads


class Plugin:
    """`kubectl podgate` with the cluster's administrator."""

    def __init__(self, control_plane: ControlPlane, output: pytest.CaptureFixture[str]) -> None:
        command = shutil.which("kubectl")
        if command is None:
            pytest.fail("kubectl is not installed; put it into PATH", pytrace=False)
        kubeconfig = control_plane.kubeconfig("admin")
        self.options = ["--kubectl", command, "--kubeconfig", str(kubeconfig), "--timeout=30"]
        self._output = output
        self.errors = ""
        """The standard error of the last command."""

    def run(self, *arguments: str) -> tuple[int, str]:
        """The exit status, and the standard output."""
        self._output.readouterr()
        status = main.main([*self.options, *arguments])
        captured = self._output.readouterr()
        self.errors = captured.err
        return status, captured.out

    def suggested(self, users: Workloads) -> list[Any]:
        """Policies for a namespace that need no decision; the cluster is younger than a day."""
        _, text = self.run("suggest", "--yes", "-n", users.namespace)
        return [one for one in yaml.safe_load_all(text) if one is not None]
