"""Route netlink that answers as the kernel does, for readers of its tables."""

import errno
import os
import struct
from collections.abc import Callable
from typing import TypeVar, cast

from agent.linux import netlink
from bpf.netlink import NLM_F_DUMP, encode

T = TypeVar("T")


class Answers:
    """Keeps requests, and answers each with the next of its responses."""

    def __init__(self, *responses: list[bytes] | int) -> None:
        """responses: messages without their header, or an error's number."""
        self._responses = list(responses)
        self.requests: list[tuple[int, bytes, int]] = []
        """The kind of each, its body and its flags."""
        self.is_filtered: list[bool] = []

    def request(self, kind: int, body: bytes, flags: int = 0) -> list[bytes]:
        self.requests.append((kind, body, flags))
        response = self._responses.pop(0)
        if isinstance(response, int):
            raise OSError(response, os.strerror(response))
        return [encode(kind, 0, content) for content in response]

    def dump(self, kind: int, body: bytes) -> list[bytes]:
        return self.request(kind, body, NLM_F_DUMP)

    async def within(
        self,
        call: Callable[[netlink.Exchange], T],
        *,
        netns: object = None,
        is_filtered: bool = False,
    ) -> T:
        self.is_filtered.append(is_filtered)
        return call(cast(netlink.Exchange, self))


def route(
    family: int,
    length: int = 0,
    *,
    table: int = 254,
    protocol: int = 3,
    kind: int = 1,
    attributes: bytes = b"",
) -> bytes:
    """A struct rtmsg and its attributes."""
    return struct.pack("=8BI", family, length, 0, 0, table, protocol, 0, kind, 0) + attributes


OWN_ERRORS = (errno.EMFILE, errno.ENOMEM, errno.ENOBUFS)
