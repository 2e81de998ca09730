"""Which of several pods with one address a request of the kubelet belongs to. No I/O.

The kubelet's first request to a port is known, except for the version in its user agent and the
order of its headers. Behind a redirect its client (Go's net/http, Client.do) sends the same
headers, and in Referer the URL before. So a chain of redirects is followed from the known request
on: each URL in it belongs to the pod of the URL before. A pod can redirect to a URL of another one;
that URL then belongs to both for a while, and shows nothing.
"""

import re
import time
from collections.abc import Callable

from agent.relay.messages import Sharing
from bpf.abi import IPAddress

# Kubernetes' own limit for the headers of a probe is lower than that of a pod's spec.
HEAD_MAX_BYTES = 1 << 16
# A probe follows a redirect at once.
_CHAIN_SECONDS = 5.0
# A pod redirects its own probe as often as it likes.
_MAX_CHAINED = 256

_END = b"\r\n\r\n"
_METHOD = b"GET "
_VERSION = re.compile(rb"(User-Agent: kube-(?:probe|lifecycle)/)\d+\.\d+\+?")
_REFERER = b"Referer: "

Head = tuple[bytes, ...]
"""The request line, and all headers in alphabetical order."""


def is_complete(received: bytes) -> bool:
    """Whether no more bytes have to be read to find the pod: it is a request's head, or none."""
    is_http = received.startswith(_METHOD[: len(received)])
    return not is_http or _END in received or len(received) > HEAD_MAX_BYTES


class SharedPorts:
    """The requests to one address that several pods have."""

    def __init__(
        self, address: IPAddress, sharing: Sharing, now: Callable[[], float] = time.monotonic
    ) -> None:
        self.ports = frozenset(sharing.ports)
        self.otherwise = sharing.otherwise
        self.keys = sorted({request.key for request in sharing.requests})
        self._now = now
        self._origin = f"http://[{address}]:" if address.version == 6 else f"http://{address}:"
        self._keys_by_request: dict[tuple[int, Head], set[str]] = {}
        self._keys_by_url: dict[bytes, set[str]] = {}
        self._chained: dict[bytes, dict[str, float]] = {}
        """By URL behind a redirect: the pods, and until when."""
        self._has_referers = True
        """Whether Referer is no header of a pod's spec."""
        for one in sharing.requests:
            head = _head(one.sent)
            self._keys_by_request.setdefault((one.port, head), set()).add(one.key)
            self._keys_by_url.setdefault(self._url(one.port, head), set()).add(one.key)
            self._has_referers &= not _referers(head)

    def key_of(self, port: int, received: bytes) -> str | None:
        """The key of the target to which this request belongs; None if it does not show that."""
        if not received.endswith(_END) or received.count(_END) != 1:
            return None
        head = _head(received)
        keys = self._keys_by_request.get((port, head))
        if keys is not None:
            return next(iter(keys)) if len(keys) == 1 else None
        referers = _referers(head)
        if not self._has_referers or len(referers) != 1:
            return None
        keys = self._keys_by_url.get(referers[0], set()) | self._chained_to(referers[0])
        if len(keys) != 1:
            return None
        (key,) = keys
        self._chain(self._url(port, head), key)
        return key

    def _chained_to(self, url: bytes) -> set[str]:
        now = self._now()
        return {key for key, until in self._chained.get(url, {}).items() if until > now}

    def _chain(self, url: bytes, key: str) -> None:
        if len(self._chained) >= _MAX_CHAINED:
            now = self._now()
            self._chained = {
                each: keys
                for each, keys in self._chained.items()
                if any(until > now for until in keys.values())
            }
        if len(self._chained) < _MAX_CHAINED or url in self._chained:
            self._chained.setdefault(url, {})[key] = self._now() + _CHAIN_SECONDS

    def _url(self, port: int, head: Head) -> bytes:
        target = head[0].removeprefix(_METHOD).rpartition(b" ")[0]
        return f"{self._origin}{port}".encode() + target


def _head(sent: bytes) -> Head:
    line, *headers = sent.removesuffix(_END).split(b"\r\n")
    return (line, *sorted(_VERSION.sub(rb"\1", header) for header in headers))


def _referers(head: Head) -> list[bytes]:
    return [header[len(_REFERER) :] for header in head if header.startswith(_REFERER)]
