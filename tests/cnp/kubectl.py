"""kubectl, with any kubeconfig and its ways to log in."""

import json
import os
import subprocess
from collections.abc import Sequence
from typing import Any

Json = dict[str, Any]

_TIMEOUT_SECONDS = 120.0


class KubectlError(Exception):
    """What kubectl reports."""


class Kubectl:
    """One cluster. Each call has a time limit, and raises `KubectlError`."""

    def __init__(self, program: str, kubeconfig: str) -> None:
        """kubeconfig: empty for kubectl's own rules."""
        self._command = [program, *([f"--kubeconfig={kubeconfig}"] if kubeconfig else [])]

    def get(self, *what: str) -> Json:
        found: Json = json.loads(self._run("get", "--output=json", *what))
        return found

    def has(self, *what: str) -> bool:
        return bool(self._run("get", "--ignore-not-found", "--output=name", *what).strip())

    def create(self, objects: Sequence[Json]) -> None:
        body = {"apiVersion": "v1", "kind": "List", "items": list(objects)}
        self._run("create", "--filename=-", content=json.dumps(body))

    def wait_for_definition(self, name: str) -> None:
        """Until it is served."""
        what = f"customresourcedefinition/{name}"
        self._run("wait", "--for=condition=Established", "--timeout=60s", what)

    def delete(self, *what: str) -> None:
        """Wait for the end of it; nothing if there is none."""
        self._run("delete", "--ignore-not-found", f"--timeout={_TIMEOUT_SECONDS:.0f}s", *what)

    def shell(self, namespace: str, pod: str, script: str) -> str:
        """What a script prints in a pod's container."""
        return self._run("exec", f"--namespace={namespace}", pod, "--", "sh", "-c", script)

    def _run(self, *arguments: str, content: str = "") -> str:
        try:
            done = subprocess.run(
                [*self._command, *arguments],
                input=content,
                capture_output=True,
                text=True,
                timeout=_TIMEOUT_SECONDS + 30,
                check=False,
                # An interrupt is for the runner, which then removes all with kubectl.
                start_new_session=True,
                env=os.environ,
            )
        except OSError as error:
            raise KubectlError(f"{self._command[0]} cannot be started: {error}") from error
        except subprocess.TimeoutExpired as error:
            raise KubectlError(f"kubectl {arguments[0]} did not end in time") from error
        if done.returncode:
            raise KubectlError(f"kubectl {arguments[0]}: {done.stderr.strip()}")
        return done.stdout
