"""Rules: who of the node may start flows to a pod."""

import dataclasses
import enum

from bpf import abi

MAX_PORT = 65535


class Sender(enum.IntEnum):
    """Whom a rule lets in: the twin of `enum sender`."""

    ANY = 0
    KUBELET = 1
    CGROUP = 2
    ANCESTOR = 3
    KERNEL = 4


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """One exception of one gate.

    cgroup: id (inode number) of the sender's cgroup, for CGROUP and ANCESTOR; level: how many
    directories it lies below the cgroup root, for ANCESTOR. protocol: IP protocol number, 0 for
    all. Ports are the pod's, inclusive. id: key of its hit counter, 0 for none.
    """

    sender: Sender
    protocol: int = 0
    first_port: int = 0
    last_port: int = MAX_PORT
    cgroup: int = 0
    level: int = 0
    id: int = 0

    def pack(self) -> abi.Rule:
        return abi.Rule(
            cgroup=self.cgroup,
            id=self.id,
            level=self.level,
            first_port=self.first_port,
            last_port=self.last_port,
            sender=self.sender,
            protocol=self.protocol,
        )

    @classmethod
    def unpack(cls, entry: abi.Rule) -> "Rule":
        return cls(
            sender=Sender(entry.sender),
            protocol=entry.protocol,
            first_port=entry.first_port,
            last_port=entry.last_port,
            cgroup=entry.cgroup,
            level=entry.level,
            id=entry.id,
        )
