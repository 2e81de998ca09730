"""One row of the table of attacks."""

import dataclasses
from collections.abc import Callable, Mapping

from tests.attacks.rights import Rights
from tests.attacks.site import Shows, Site, Way

Attempt = Callable[["Attack"], Shows]


@dataclasses.dataclass(frozen=True, slots=True)
class Attack:
    """What a trick gets: where it is tried, and how. way: None for tricks that need none."""

    site: Site
    version: int
    rights: Rights
    way: Way | None = None

    def by(self) -> Way:
        """The way of a trick that needs one."""
        assert self.way is not None
        return self.way


@dataclasses.dataclass(frozen=True, slots=True)
class Gap:
    """Where a trick does not work, with or without podgate, and why; or, if it `is_bypass`, where
    it works with podgate, too, as documented. What is empty means all."""

    why: str
    topologies: frozenset[str] = frozenset()
    ways: frozenset[str] = frozenset()
    versions: frozenset[int] = frozenset()
    is_bypass: bool = False

    def covers(self, topology: str, way: str, version: int) -> bool:
        return (
            (not self.topologies or topology in self.topologies)
            and (not self.ways or way in self.ways)
            and (not self.versions or version in self.versions)
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Trick:
    """attempt: does it, and returns what shows that it reached the pod.

    rights: the least with which it works, by IP version. needs_way: it is tried by each way of a
    topology. gaps: where it does not work.
    """

    name: str
    what: str
    attempt: Attempt
    rights: Mapping[int, Rights]
    needs_way: bool = False
    gaps: tuple[Gap, ...] = ()

    def __str__(self) -> str:
        return self.name


def anyone(*versions: int) -> dict[int, Rights]:
    """Works without rights, over these IP versions; both unless given."""
    return dict.fromkeys(versions or (4, 6), Rights.NONE)


def with_raw_sockets(*versions: int) -> dict[int, Rights]:
    """Needs CAP_NET_RAW."""
    return dict.fromkeys(versions or (4, 6), Rights.NET_RAW)


ANYONE_OVER_IPV6 = {4: Rights.NET_RAW, 6: Rights.NONE}
"""A source that is not the node's needs CAP_NET_RAW over IPv4."""


def unless(
    why: str,
    *,
    topologies: tuple[object, ...] = (),
    ways: tuple[str, ...] = (),
    versions: tuple[int, ...] = (),
    is_bypass: bool = False,
) -> Gap:
    """A gap, from what it covers."""
    where = frozenset(map(str, topologies)), frozenset(ways), frozenset(versions)
    return Gap(why, *where, is_bypass)
