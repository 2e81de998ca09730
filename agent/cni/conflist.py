"""Adds a plugin to the text of a CNI network configuration list, or removes it.

Every other byte stays: the file belongs to another product, and people compare it with what they
wrote. So the text is validated as a whole and then cut at the positions of its plugins.
"""

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping
from typing import TypeVar

import msgspec

from agent.errors import PodgateError

TYPE = "podgate-cni"
# Those of the plugin: deploy/cni/podgate-cni.c. Azure's list has 0.3.0, whose results are those of
# 0.3.1 (types/040 of libcni).
_VERSIONS = ("0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0")

_PIECE = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{}:,]|[^\s\[\]{}:,"]+')

T = TypeVar("T", bound=msgspec.Struct)
Entry = Mapping[str, object]


class ConflistError(PodgateError):
    """The text cannot be changed; the message is one sentence without the file's name."""


class InvalidConflistError(ConflistError):
    """libcni rejects the text, too."""


class _Plugin(msgspec.Struct):
    type: str


class _Conflist(msgspec.Struct):
    name: str
    plugins: list[_Plugin] = []
    cniVersion: str = "0.1.0"
    cniVersions: list[str] = []


class _Network(msgspec.Struct):
    type: str
    name: str = ""
    cniVersion: str = "0.1.0"


@dataclasses.dataclass(frozen=True, slots=True)
class _Span:
    """The position of a plugin in the text, from its opening brace to after its closing one."""

    start: int
    end: int
    plugin: dict[str, object]


def with_entry(text: str, entry: Entry) -> str:
    """The list with `entry` as its last plugin; unchanged if it has exactly this entry.

    Raises `ConflistError`.
    """
    conflist = _decode(text, _Conflist)
    spans = _plugins(text)
    own = [span for span in spans if span.plugin["type"] == TYPE]
    if [span.plugin for span in own] == [dict(entry)]:
        return text
    if len(own) == len(spans):
        raise ConflistError("it has no plugin that creates interfaces")
    _check_version([conflist.cniVersion, *conflist.cniVersions])
    text = without_entry(text)
    spans = _plugins(text)
    # Separated like the plugins before it.
    before = text.rindex("[", 0, spans[0].start) + 1
    space = text[before : spans[0].start]
    end = spans[-1].end
    return f"{text[:end]},{space}{json.dumps(entry)}{text[end:]}"


def without_entry(text: str) -> str:
    """The list without podgate-cni: byte for byte as before `with_entry`.

    Raises `ConflistError`.
    """
    _decode(text, _Conflist)
    spans = _plugins(text)
    for index in reversed(range(len(spans))):
        if spans[index].plugin["type"] != TYPE:
            continue
        if index:
            start, end = spans[index - 1].end, spans[index].end
        else:
            start = spans[0].start
            end = spans[1].start if len(spans) > 1 else spans[0].end
        text = text[:start] + text[end:]
        spans = _plugins(text)
    return text


def has_entry(text: str) -> bool:
    """Whether podgate-cni is in the list. Raises `ConflistError`."""
    return any(plugin.type == TYPE for plugin in _decode(text, _Conflist).plugins)


def from_network(text: str, entry: Entry) -> str:
    """A list of a single plugin's configuration (a .conf file), unchanged, and `entry`.

    As libcni does (ConfListFromConf). Raises `ConflistError`.
    """
    network = _decode(text, _Network)
    _check_version([network.cniVersion])
    head = json.dumps({"cniVersion": network.cniVersion, "name": network.name})
    return f'{head[:-1]}, "plugins": [{text.strip()}, {json.dumps(entry)}]}}\n'


def _decode(text: str, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidConflistError(f"it is not a CNI configuration: {error}") from error


def _check_version(versions: list[str]) -> None:
    """Runtimes use the newest that they support."""
    newest = max(versions, key=_in_order)
    if newest not in _VERSIONS:
        raise ConflistError(
            f"its cniVersion is {newest}, and {TYPE} supports {', '.join(_VERSIONS)}; change it to "
            "one of these, or upgrade podgate"
        )


def _in_order(version: str) -> tuple[int, ...]:
    return tuple(int(part) if part.isdecimal() else 0 for part in version.split("."))


def _plugins(text: str) -> list[_Span]:
    """The plugins of a valid text; of several lists the last, as decoders do."""
    spans: list[_Span] = []
    depth = 0
    start = 0
    previous: list[str] = ["", ""]
    is_inside = False
    for piece, position in _pieces(text):
        if piece in ("{", "["):
            if depth == 1 and piece == "[" and _is_plugins(previous):
                is_inside = True
                spans = []
            if depth == 2:
                start = position
            depth += 1
        elif piece in ("}", "]"):
            depth -= 1
            if depth == 1:
                is_inside = False
            if depth == 2 and is_inside:
                end = position + 1
                spans.append(_Span(start, end, json.loads(text[start:end])))
        previous = [previous[1], piece]
    return spans


def _pieces(text: str) -> Iterator[tuple[str, int]]:
    for match in _PIECE.finditer(text):
        yield match[0], match.start()


def _is_plugins(previous: list[str]) -> bool:
    name, colon = previous
    return colon == ":" and json.loads(name) == "plugins"
