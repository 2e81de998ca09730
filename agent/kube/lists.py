"""Lists of the API server, read item by item.

A list is one JSON object that may be a gigabyte, where tenants fill their pods up to etcd's limit:
1.5 MB, which JSON may write as 9. So only one item of it is in memory at a time, and callers keep
what they read of it.
"""

import re
from collections.abc import Callable, Iterator, Mapping

import msgspec

from agent.kube import responses
from agent.kube.client import JSON, ApiClient, ApiError

# etcd stores no object over 1.5 MiB; JSON may be several times the size of its protobuf.
_MAX_ITEM_BYTES = 16 << 20
# A list of many small objects is in the server's cache; the slowest is one of many large pods.
_LIST_SECONDS = 60.0

# The next brace outside strings. Possessive: a string without its end is no match, at once.
_STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_BRACE = re.compile(rb'[^"{}]*+(?:%b[^"{}]*+)*+([{}])' % _STRING, re.DOTALL)
_ITEMS = re.compile(rb'"items"\s*:\s*\[\s*$')


async def read(
    api: ApiClient,
    path: str,
    *,
    query: Mapping[str, str],
    accept: str = JSON,
    on_item: Callable[[bytes], None],
) -> str:
    """List, call `on_item` with each item's JSON, and return the list's resource version.

    Raises `ApiError`, also if the response ends early or is no list: then the items so far are
    not all.
    """
    splitter = ListSplitter()
    async with api.content(
        path, query=query, accept=accept, timeout_seconds=_LIST_SECONDS
    ) as parts:
        async for part in parts:
            for item in splitter.feed(part):
                on_item(item)
    for item in splitter.finish():
        on_item(item)
    try:
        return responses.decode(splitter.envelope, responses.ObjectList).metadata.resource_version
    except msgspec.DecodeError as error:
        raise _undecodable(str(error)) from error


class ListSplitter:
    """Splits a list's JSON into its items, and the rest. No I/O."""

    def __init__(self) -> None:
        self.envelope = b""
        """The list without its items, after `finish`."""
        self._content = bytearray()
        self._scanned = 0
        """The position behind the last brace in `_content`."""
        self._item_at: int | None = None
        """Where the current item starts in `_content`."""
        self._depth = 0
        self._has_items = self._has_all = False
        self._scan_from_bytes = 0
        """How long `_content` must be for the next scan."""

    def feed(self, part: bytes) -> list[bytes]:
        """The items that end in this part of the response, or in one before. Raises `ApiError`."""
        self._content += part
        if len(self._content) < self._scan_from_bytes:
            return []
        found = list(self._scan())
        if len(self._content) > _MAX_ITEM_BYTES:
            raise _undecodable(f"an object has more than {_MAX_ITEM_BYTES} bytes")
        # The end of a long string is not searched for again with every packet.
        self._scan_from_bytes = len(self._content) + (len(self._content) - self._scanned) // 2
        return found

    def finish(self) -> list[bytes]:
        """The items that `feed` has not returned. Raises `ApiError`."""
        found = list(self._scan())
        if self._depth or self._item_at is not None:
            raise _undecodable("it ends early")
        self.envelope += self._content
        return found

    def _scan(self) -> Iterator[bytes]:
        done = 0
        while match := _BRACE.match(self._content, self._scanned):
            at = match.start(1)
            if self._content[at] == ord("{"):
                if self._depth == 1:
                    self._open(self._scanned, at, done)
                self._depth += 1
            else:
                self._depth -= 1
                if self._depth == 1 and self._item_at is not None:
                    yield bytes(self._content[self._item_at : at + 1])
                    self._item_at = None
                    done = at + 1
            self._scanned = at + 1
        keep = done if self._item_at is None else self._item_at
        del self._content[:keep]
        self._scanned -= keep
        if self._item_at is not None:
            self._item_at = 0

    def _open(self, behind: int, at: int, done: int) -> None:
        """An object in the list's own starts at `at`; `behind`: the end of the brace before."""
        if self._has_items and not self._has_all:
            self._has_all = b"]" in self._content[behind:at]
        elif not self._has_items and _ITEMS.search(self._content[behind:at]):
            self._has_items = True
            self.envelope += self._content[done:at]
        if self._has_items and not self._has_all:
            self._item_at = at


def _undecodable(reason: str) -> ApiError:
    return ApiError(f"the API server's list cannot be decoded: {reason}")
