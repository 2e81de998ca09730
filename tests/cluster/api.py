"""The tests' own client of the API server. It shares no code with podgate's."""

import http.client
import json
import socket
import ssl
import threading
import urllib.parse
from collections.abc import Iterator
from typing import Any

from tests.cluster.pki import Pki

Json = dict[str, Any]

MERGE = "application/merge-patch+json"
APPLY = "application/apply-patch+yaml"
STRATEGIC = "application/strategic-merge-patch+json"
_TIMEOUT_SECONDS = 30


class ApiError(Exception):
    """The API server rejected a request."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code


class Api:
    """Requests of one user. Each thread has a connection of its own, which stays open."""

    def __init__(self, address: str, port: int, pki: Pki, user: str) -> None:
        self._address = address
        self._port = port
        self._tls = ssl.create_default_context(cafile=str(pki.authority))
        self._tls.load_cert_chain(pki.certificate(user), pki.key(user))
        self._of_thread = threading.local()

    def close(self) -> None:
        """Close this thread's connection."""
        if kept := getattr(self._of_thread, "connection", None):
            kept.close()
            self._of_thread.connection = None

    def get(self, path: str, **query: str) -> Json:
        return self._request("GET", path, query)

    def find(self, path: str) -> Json | None:
        """The object, or None if there is none."""
        try:
            return self.get(path)
        except ApiError as error:
            if error.code != 404:
                raise
            return None

    def items(self, path: str, **query: str) -> list[Json]:
        found: list[Json] = self.get(path, **query)["items"]
        return found

    def create(self, path: str, body: Json, **query: str) -> Json:
        return self._request("POST", path, query, body)

    def patch(self, path: str, body: Json, content_type: str = MERGE) -> Json:
        """A merge patch: null removes a field, lists are replaced. STRATEGIC: lists such as that of
        conditions are merged by their key."""
        return self._request("PATCH", path, {}, body, content_type)

    def apply(self, path: str, body: Json) -> Json:
        """Create the object, or change it to have these fields (server-side apply)."""
        query = {"fieldManager": "podgate-tests", "force": "true"}
        return self._request("PATCH", path, query, body, APPLY)

    def delete(self, path: str, **query: str) -> None:
        """An object or, without a name, all of them; nothing if there is none."""
        try:
            self._request("DELETE", path, query)
        except ApiError as error:
            if error.code != 404:
                raise

    def text(self, path: str) -> str:
        """A response that is not JSON, such as a log or a metrics page."""
        return self._send("GET", path, None, "").decode(errors="replace")

    def watch(self, path: str, **query: str) -> Iterator[Json]:
        """Events until the server ends the watch, or the connection breaks. With `timeoutSeconds`
        it may be silent for that long, since nothing happens."""
        connection = self._connect()
        if silence := query.get("timeoutSeconds"):
            connection.sock.settimeout(float(silence))
        encoded = urllib.parse.urlencode({"watch": "true", **query})
        try:
            connection.request("GET", f"{path}?{encoded}")
            response = connection.getresponse()
            if response.status != 200:
                raise ApiError(response.status, response.read().decode(errors="replace"))
            while line := response.readline():
                yield json.loads(line)
        finally:
            connection.close()

    def _request(
        self,
        method: str,
        path: str,
        query: dict[str, str],
        body: Json | None = None,
        content_type: str = "application/json",
    ) -> Json:
        if query:
            path += "?" + urllib.parse.urlencode(query)
        content = None if body is None else json.dumps(body).encode()
        found: Json = json.loads(self._send(method, path, content, content_type))
        return found

    def _send(self, method: str, path: str, content: bytes | None, content_type: str) -> bytes:
        headers = {"Content-Type": content_type} if content is not None else {}
        kept: http.client.HTTPSConnection | None = getattr(self._of_thread, "connection", None)
        try:
            status, answer = self._exchange(kept or self._connect(), method, path, content, headers)
        except (ConnectionError, ssl.SSLEOFError):
            # The server closes connections that were idle; it has not read the request then.
            if kept is None:
                raise
            status, answer = self._exchange(self._connect(), method, path, content, headers)
        if status >= 400:
            raise ApiError(status, _message(answer))
        return answer

    def _exchange(
        self,
        connection: http.client.HTTPSConnection,
        method: str,
        path: str,
        content: bytes | None,
        headers: dict[str, str],
    ) -> tuple[int, bytes]:
        self._of_thread.connection = None
        try:
            connection.request(method, path, content, headers)
            response = connection.getresponse()
            answer = response.read()
        except BaseException:
            connection.close()
            raise
        self._of_thread.connection = connection
        return response.status, answer

    def _connect(self) -> http.client.HTTPSConnection:
        made = http.client.HTTPSConnection(
            self._address, self._port, timeout=_TIMEOUT_SECONDS, context=self._tls
        )
        made.connect()
        # Small requests wait for no acknowledgement.
        made.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return made


def _message(answer: bytes) -> str:
    try:
        return str(json.loads(answer)["message"])
    except (ValueError, KeyError, TypeError):
        return answer.decode(errors="replace")
