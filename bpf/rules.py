"""Rules: the sources on the host that a gate admits."""

import dataclasses
import enum

from bpf import abi

MAX_PORT = 65535


class SourceKind(enum.IntEnum):
    """The kind of source that a rule admits: the twin of `enum source_kind`."""

    ANY = 0
    KUBELET = 1
    CGROUP = 2
    ANCESTOR = 3
    KERNEL = 4


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """One rule of one gate.

    cgroup: id (inode number) of the source's cgroup, for CGROUP and ANCESTOR; level: its depth
    below the cgroup root in directories, for ANCESTOR. protocol: IP protocol number, 0 for all.
    Ports are the pod's, inclusive. id: key of the rule's hit counter, 0 for none.
    """

    source: SourceKind
    protocol: int = 0
    first_port: int = 0
    last_port: int = MAX_PORT
    cgroup: int = 0
    level: int = 0
    id: int = 0

    @property
    def ports_text(self) -> str:
        if (self.first_port, self.last_port) == (0, MAX_PORT):
            return "any"
        if self.first_port == self.last_port:
            return str(self.first_port)
        return f"{self.first_port}-{self.last_port}"

    def pack(self) -> abi.CRule:
        return abi.CRule(
            cgroup=self.cgroup,
            id=self.id,
            level=self.level,
            first_port=self.first_port,
            last_port=self.last_port,
            source_kind=self.source,
            protocol=self.protocol,
        )

    @classmethod
    def unpack(cls, entry: abi.CRule) -> "Rule":
        return cls(
            source=SourceKind(entry.source_kind),
            protocol=entry.protocol,
            first_port=entry.first_port,
            last_port=entry.last_port,
            cgroup=entry.cgroup,
            level=entry.level,
            id=entry.id,
        )
