"""Requests of a run to the API server, by paths: with kubectl, or from a pod of the cluster."""

import contextlib
import http.client
import json
import pathlib
import ssl
from typing import Protocol

from agent.operate.kubectl.agent_pods import CONTAINER
from agent.operate.kubectl.cluster import Cluster, KubectlError, Object


class Access(Protocol):
    """Each method blocks, and raises `KubectlError`, whose text has the server's reason as in
    "Error from server (NotFound): "."""

    def get(self, path: str) -> Object: ...

    def text(self, path: str) -> str: ...

    def create(self, path: str, body: Object) -> Object: ...

    def delete(self, path: str) -> None: ...

    def run(self, namespace: str, pod: str, *command: str) -> str:
        """The output of a command in an agent's container."""


class KubectlAccess:
    """By kubectl, with the rights of its user."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._timeout = f"--request-timeout={cluster.timeout_seconds:.0f}s"

    def get(self, path: str) -> Object:
        return _object(self.text(path))

    def text(self, path: str) -> str:
        return self._cluster.run("get", "--raw", path, self._timeout)

    def create(self, path: str, body: Object) -> Object:
        options = ("--raw", path, "--filename=-", self._timeout)
        return _object(self._cluster.run("create", *options, content=json.dumps(body)))

    def delete(self, path: str) -> None:
        self._cluster.run("delete", "--raw", path, self._timeout)

    def run(self, namespace: str, pod: str, *command: str) -> str:
        place = (f"--namespace={namespace}", f"--container={CONTAINER}", pod)
        return self._cluster.run("exec", *place, "--", *command)


class PodAccess:
    """From a pod of the cluster, with the token of its service account."""

    def __init__(
        self,
        host: str,
        port: int,
        account: pathlib.Path = pathlib.Path("/var/run/secrets/kubernetes.io/serviceaccount"),
        timeout_seconds: float = 10.0,
    ) -> None:
        """host, port: of the API server; account: the directory of the token and of ca.crt. Raises
        `OSError`."""
        self._host = host
        self._port = port
        self._token = account / "token"
        self._timeout_seconds = timeout_seconds
        self._tls = ssl.create_default_context(cafile=str(account / "ca.crt"))

    def get(self, path: str) -> Object:
        return _object(self.text(path))

    def text(self, path: str) -> str:
        return self._request("GET", path)

    def create(self, path: str, body: Object) -> Object:
        return _object(self._request("POST", path, json.dumps(body).encode()))

    def delete(self, path: str) -> None:
        self._request("DELETE", path)

    def run(self, namespace: str, pod: str, *command: str) -> str:
        raise KubectlError(f"no command runs in {namespace}/{pod} from a pod")

    def _request(self, method: str, path: str, content: bytes | None = None) -> str:
        # The kubelet renews it.
        token = self._token.read_text("utf-8").strip()
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        connection = http.client.HTTPSConnection(
            self._host, self._port, timeout=self._timeout_seconds, context=self._tls
        )
        try:
            with contextlib.closing(connection):
                connection.request(method, path, content, headers)
                response = connection.getresponse()
                body = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise KubectlError(f"no response by the API server: {error or repr(error)}") from error
        if not 200 <= response.status < 300:
            status = _status(body)
            reason = status.get("reason") or f"HTTP status {response.status}"
            message = status.get("message") or response.reason
            raise KubectlError(f"Error from server ({reason}): {message}")
        return body.decode(errors="replace")


def _status(content: bytes) -> Object:
    """The server's meta/v1 Status."""
    try:
        found = json.loads(content)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _object(text: str) -> Object:
    found = _status(text.encode())
    if not found:
        raise KubectlError("the API server's answer is no object")
    return found
