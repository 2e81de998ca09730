"""The words for what the gate decided: one enum each, the twin of the C enum in src/abi.h."""

import enum


class Mode(enum.IntEnum):
    """What a gate does with packets that it would drop."""

    OFF = 0
    AUDIT = 1
    ENFORCE = 2
    STRICT = 3

    @property
    def word(self) -> str:
        """As in labels, metrics and the command line."""
        return self.name.lower()

    @classmethod
    def from_word(cls, word: str) -> "Mode":
        """The mode called `word`. Raises `ValueError` with a sentence naming the known ones."""
        for mode in cls:
            if mode.word == word:
                return mode
        known = ", ".join(mode.word for mode in cls)
        raise ValueError(f"mode {word!r} is not known; use one of {known}")


class Verdict(enum.IntEnum):
    """What became of a packet."""

    PASS = 0
    DROP = 1
    WOULD_DROP = 2

    @property
    def word(self) -> str:
        return self.name.lower().replace("_", "-")


class Reason(enum.IntEnum):
    """The one word that says why."""

    ARP = 0
    CONTROL = 1
    ESTABLISHED = 2
    REPLY = 3
    RULE = 4
    PROBE = 5
    GRACE = 6
    DEAD_MAN = 7
    UNPARSABLE = 8
    FRAGMENT = 9
    STRAY = 10
    NODE = 11
    KERNEL = 12
    TUNNEL = 13
    EVASION = 14
    SELF_TEST = 15
    SWITCH = 16
    FORWARDED = 17
    RELAY = 18

    @property
    def word(self) -> str:
        return self.name.lower().replace("_", "-")

    @property
    def is_drop(self) -> bool:
        """Whether a packet is dropped for it, rather than let through."""
        return self in _DROPS

    @property
    def meaning(self) -> str:
        """One line for people: docs/reference/reasons.md and `podgate status` show it."""
        return _MEANINGS[self]


_DROPS = frozenset(
    {
        *(Reason.UNPARSABLE, Reason.FRAGMENT, Reason.STRAY, Reason.NODE, Reason.KERNEL),
        *(Reason.TUNNEL, Reason.EVASION, Reason.SELF_TEST, Reason.RELAY),
    }
)

_MEANINGS = {
    Reason.ARP: "address resolution",
    Reason.CONTROL: "ICMP errors, neighbour discovery, IGMP and MLD",
    Reason.ESTABLISHED: "TCP that opens nothing: the node answers what the pod began",
    Reason.REPLY: "the node answers what the pod asked, or goes on with a datagram let in",
    Reason.RULE: "a rule lets this sender in",
    Reason.PROBE: "the kubelet, to what the pod declares",
    Reason.GRACE: "may answer what the pod asked before the gate was there",
    Reason.DEAD_MAN: "no agent for so long that everything passes",
    Reason.UNPARSABLE: "not to be read to its transport header, so not to be trusted",
    Reason.FRAGMENT: "a fragment of a TCP packet, which hides the flags",
    Reason.STRAY: "to an address that is not this pod's: a copy that a bridge flooded",
    Reason.NODE: "a process of the node started it",
    Reason.KERNEL: "the node's kernel started it: no socket is known",
    Reason.TUNNEL: "to a tunnel's port, wrapped so as to come out as forwarded",
    Reason.EVASION: "a packet socket asked for a way that passes no gate",
    Reason.SWITCH: "no socket is known, as when Open vSwitch puts in again what others sent",
    Reason.FORWARDED: "an IPv6 fragment of what others sent: the kernel forgot how it came in",
    Reason.RELAY: "from a pod or from outside to the relay, which serves the kubelet alone",
    Reason.SELF_TEST: "the agent asked whether this gate is on the way: TCP to port 0",
}
