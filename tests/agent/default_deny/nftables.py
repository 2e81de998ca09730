"""nftables in memory: takes the scripts of `Ruleset`, and answers as nft 1.0.6 does."""

import asyncio
import json
import re

import pytest

from agent.default_deny import installed
from agent.linux import nft

INTERFACES = {1: "lo", 2: "eth0", 7: "veth7", 8: "veth8"}

_NO_SUCH = "No such file or directory"


class Nftables:
    """The tables of one network namespace."""

    def __init__(self) -> None:
        self.scripts: list[str] = []
        """Those that were applied."""
        self.families: set[str] = set()
        self.sets: dict[str, set[int]] = {"gated": set(), "not_pods": set()}
        """Of the inet family; numbers of interfaces."""
        self.kubelet = ""
        """The rules of the chain of that name."""
        self.lacks_bridge = False
        self.failures: list[Exception] = []
        """Raised by the next calls of `apply` that change anything."""
        self.interfaces = dict(INTERFACES)
        self.generation: int | None = 1
        """Of the ruleset; None: it cannot be read."""
        self.queries: list[tuple[str, ...]] = []
        self._chains = ""

    async def apply(self, script: str, *, only_check: bool = False) -> None:
        if self.lacks_bridge and "table bridge podgate {" in script:
            raise nft.NftError("Could not process rule: Operation not supported")
        await asyncio.sleep(0.003)  # as a call of nft takes
        if only_check:
            return
        if self.failures:
            raise self.failures.pop(0)
        if "podgate {" not in script and "table" not in script and not self.families:
            raise nft.NftError(f"Could not process rule: {_NO_SUCH}")
        self.scripts.append(script)
        self.change()
        for line in script.splitlines():
            self._apply_line(line)

    def _apply_line(self, line: str) -> None:
        words = line.split()
        if words[:2] == ["delete", "table"]:
            self.families.discard(words[2])
            self._chains = ""
        elif words[:1] == ["table"]:
            self.families.add(words[1])
            self._chains = "rules"
        elif words[:1] == ["set"] and words[1] in self.sets:
            self.sets[words[1]] = _numbers(line)
        elif words[:3] == ["add", "element", "inet"] and words[4] in self.sets:
            self.sets[words[4]] |= _numbers(line)
        elif words[:3] == ["delete", "element", "inet"] and words[4] in self.sets:
            assert _numbers(line) <= self.sets[words[4]], "nft rejects a missing element"
            self.sets[words[4]] -= _numbers(line)
        elif words[:2] == ["flush", "chain"]:
            self.kubelet = ""
        elif words[:2] == ["add", "rule"]:
            self.kubelet = " ".join(words[5:])

    def change(self) -> None:
        """One transaction of any program."""
        if self.generation is not None:
            self.generation += 1

    async def read_generation(self) -> int | None:
        return self.generation

    async def query(self, *arguments: str) -> str:
        self.queries.append(arguments)
        match arguments:
            case ("list", "tables"):
                return "".join(f"table {family} podgate\n" for family in sorted(self.families))
            case ("--json", "list", "set", "inet", "podgate", name) if "inet" in self.families:
                names = [self.interfaces.get(number, number) for number in sorted(self.sets[name])]
                return _set_as_json(name, names)
            case ("--stateless", "list", "chain", *_) if self._chains:
                return self._chains
        raise nft.NftError(_NO_SUCH)

    def flush(self) -> None:
        """As `nft flush ruleset`."""
        self.families, self._chains = set(), ""
        self.change()


def _numbers(line: str) -> set[int]:
    return {int(number) for number in re.findall(r'"(\d+)"', line)}


def _set_as_json(name: str, elements: list[str | int]) -> str:
    version = {"version": "1.0.6", "release_name": "Lester Gooch #5", "json_schema_version": 1}
    found = {"family": "inet", "name": name, "table": "podgate", "type": "iface_index", "handle": 2}
    content = {**found, **({"elem": elements} if elements else {})}
    return json.dumps({"nftables": [{"metainfo": version}, {"set": content}]})


@pytest.fixture
def nftables(monkeypatch: pytest.MonkeyPatch) -> Nftables:
    """A node that tracks connections, with an uplink and two veths."""
    made = Nftables()
    monkeypatch.setattr(nft, "apply", made.apply)
    monkeypatch.setattr(nft, "query", made.query)
    monkeypatch.setattr(nft, "generation", made.read_generation)
    monkeypatch.setattr(installed, "tracks_connections", lambda: True)
    monkeypatch.setattr("socket.if_nameindex", lambda: list(made.interfaces.items()))
    return made
