"""Answers of agents to users without rights on nodes, by the API server's proxy to their pods.

`kubectl proxy` gives requests the user's identity, and lets them have headers. The agent does not
see that identity: the API server removes the header Authorization. What proves the right to read is
a token of a service account, made for ten minutes and for agents alone: a node that intercepts it
gains these answers, and nothing of the user's.
"""

import contextlib
import http.client
import json
import os
import pathlib
import select
import shutil
import socket
import subprocess
import tempfile
import threading
import urllib.parse

from agent.admin import read_api
from agent.operate.kubectl.agent_pods import AgentPod
from agent.operate.kubectl.cluster import Cluster, KubectlError

# The least that a TokenRequest may have (pkg/apis/authentication/validation).
_TOKEN_SECONDS = 600
# Of kubectl 1.32: "Starting to serve on ADDRESS".
_STARTED = "Starting to serve on "
# It needs no more of the API than these.
_PATHS = "^/api/v1/namespaces/[^/]+/(pods/[^/]+/proxy/|serviceaccounts/[^/]+/token$)"
_END_SECONDS = 5.0


class Reader:
    """Reads agents' answers, all with one process of kubectl and one token. `close` it.

    What keeps it from reading at all is found once, by the first request.
    """

    def __init__(self, cluster: Cluster, namespace: str = "") -> None:
        """namespace: whose pods are enough, if the user may not read those of all namespaces."""
        self._cluster = cluster
        self._namespace = namespace
        self._lock = threading.Lock()
        self._opened: tuple[str, str] | None = None
        """The token, and the namespace that it is for: empty for all."""
        self._problem = ""
        self._undo = contextlib.ExitStack()
        self._socket = pathlib.Path()

    def get(self, agent: AgentPod, answer: str, **query: str) -> str:
        """The answer of one agent, such as "status", as JSON. Raises `KubectlError`."""
        if not agent.read_port:
            raise KubectlError("its agent serves no answers over the network (metrics.port)")
        token, namespace = self._open()
        if namespace:
            query["namespace"] = namespace
        pod = f"https:{agent.name}:{agent.read_port}"
        text = urllib.parse.urlencode(query)
        path = (
            f"/api/v1/namespaces/{self._cluster.namespace}/pods/{pod}/proxy{read_api.PATH}/{answer}"
        )
        return self._request("GET", f"{path}?{text}" if text else path, token=token)

    @property
    def namespace(self) -> str:
        """Whose pods alone answers have; empty for all, or if nothing has been read."""
        return self._opened[1] if self._opened else ""

    def close(self) -> None:
        self._undo.close()

    def _open(self) -> tuple[str, str]:
        """Raises `KubectlError`."""
        with self._lock:
            if self._opened is None and not self._problem:
                try:
                    self._start()
                    self._opened = self._token()
                except KubectlError as error:
                    self._problem = str(error)
            if self._opened is None:
                raise KubectlError(self._problem)
            return self._opened

    def _start(self) -> None:
        if not hasattr(socket, "AF_UNIX"):
            raise KubectlError("this system has no unix sockets for kubectl proxy")
        # The socket has the user's rights: only this user may enter the directory.
        directory = tempfile.mkdtemp(prefix="kubectl-podgate-")
        self._undo.callback(shutil.rmtree, directory, ignore_errors=True)
        self._socket = pathlib.Path(directory) / "proxy"
        process = self._cluster.open(
            *("proxy", f"--unix-socket={self._socket}", f"--accept-paths={_PATHS}"),
            ends_with_input=True,
        )
        self._undo.callback(_end, process)
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], self._cluster.timeout_seconds)
        line = process.stdout.readline().strip() if ready else "no response in time"
        if not line.startswith(_STARTED):
            raise KubectlError(f"kubectl proxy: {line or 'it has ended'}")

    def _token(self) -> tuple[str, str]:
        """Of podgate's account, or of that of the namespace. Raises `KubectlError`."""
        try:
            return self._create_token(self._cluster.namespace), ""
        except KubectlError:
            if not self._namespace or self._namespace == self._cluster.namespace:
                raise
            return self._create_token(self._namespace), self._namespace

    def _create_token(self, namespace: str) -> str:
        spec = {"audiences": [read_api.AUDIENCE], "expirationSeconds": _TOKEN_SECONDS}
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{read_api.ACCOUNT}/token"
        made = json.loads(self._request("POST", path, content=json.dumps(body)))
        return str(made["status"]["token"])

    def _request(self, method: str, path: str, *, content: str = "", token: str = "") -> str:
        """The response's body. Raises `KubectlError` unless the request succeeded."""
        headers = {"Content-Type": "application/json"} if content else {}
        if token:
            headers[read_api.TOKEN_HEADER] = token
        connection = _Connection(self._socket, self._cluster.timeout_seconds)
        try:
            with contextlib.closing(connection):
                connection.request(method, path, content or None, headers)
                response = connection.getresponse()
                body = response.read().decode(errors="replace")
        except (OSError, http.client.HTTPException) as error:
            raise KubectlError(f"no response by kubectl proxy: {error or repr(error)}") from error
        if response.status not in (200, 201):
            raise KubectlError(_in_words(response.status, body))
        return body


class _Connection(http.client.HTTPConnection):
    """To a unix socket."""

    def __init__(self, path: pathlib.Path, timeout_seconds: float) -> None:
        # kubectl proxy accepts this machine's names only.
        super().__init__("localhost", timeout=timeout_seconds)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(os.fspath(self._path))


def _in_words(status: int, body: str) -> str:
    """The message of the API server (meta/v1 Status), or the agent's sentence."""
    try:
        message = json.loads(body)["message"]
    except (ValueError, KeyError, TypeError):
        message = body.strip().partition("\n")[0]
    reason = " (Forbidden)" if status == 403 else ""
    return f"Error from server{reason}: {message or f'HTTP status {status}'}"


def _end(process: subprocess.Popen[str]) -> None:
    """Closing its standard input ends it."""
    if process.stdin is not None:
        with contextlib.suppress(OSError):
            process.stdin.close()
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()
