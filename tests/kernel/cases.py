"""The table of frames: what a packet socket on the host may send a pod, and the result.

`opens` shows what the pod's own kernel does with the frames when no gate is in the way; the live
test checks that too, so a case that claims to be dangerous is.
"""

import dataclasses
from collections.abc import Callable, Iterator

from bpf.verdicts import Reason, Verdict
from tests.kernel import frames
from tests.kernel.frames import ACK, CWR, ECE, FIN, PSH, RST, SYN, URG, Ends

Build = Callable[[Ends], bytes | tuple[bytes, ...]]

STRANGER = {4: "198.18.7.7", 6: "fd00:18:7::7"}
GROUP = {4: "224.0.0.1", 6: "ff02::1"}
NODE_LOCAL = {4: "127.0.0.1", 6: "::1"}
BOTH = (4, 6)
BIG_OPTIONS = bytes((1,)) * 40  # no-operation, as many as fit
ROUTER_ALERT_IPV4 = bytes((148, 4, 0, 0))
# Hop-by-hop options as every MLD message has them: router alert (RFC 2711), then PadN.
ROUTER_ALERT_IPV6 = bytes((frames.ICMPV6, 0, 5, 2, 0, 0, 1, 0))


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """Frames of one family, and the verdict on each of them."""

    name: str
    family: int
    build: Build
    verdict: Verdict
    reason: Reason
    opens: bool = False

    def __str__(self) -> str:
        return f"{self.name}-ipv{self.family}"

    def frames(self, ends: Ends) -> tuple[bytes, ...]:
        built = self.build(ends)
        return built if isinstance(built, tuple) else (built,)


def _dropped(
    name: str,
    reason: Reason,
    build: Build,
    *,
    families: tuple[int, ...] = BOTH,
    opens: bool = False,
) -> Iterator[Case]:
    return (Case(name, family, build, Verdict.DROP, reason, opens) for family in families)


def _passed(
    name: str, reason: Reason, build: Build, *, families: tuple[int, ...] = BOTH
) -> Iterator[Case]:
    return (Case(name, family, build, Verdict.PASS, reason) for family in families)


def _segment(flags: int, **details: bytes | int) -> Build:
    return lambda ends: frames.segment(ends, flags, **details)


def _in_ipv4(payload: Callable[[Ends], bytes], **details: bytes | int) -> Build:
    def build(ends: Ends) -> bytes:
        packet = frames.ipv4(ends, frames.TCP, payload(ends), **details)  # type: ignore[arg-type]
        return frames.ethernet(ends, frames.ETHERTYPE_IPV4, packet)

    return build


def _in_ipv6(next_header: int, payload: Callable[[Ends], bytes], **details: int) -> Build:
    def build(ends: Ends) -> bytes:
        packet = frames.ipv6(ends, next_header, payload(ends), **details)  # type: ignore[arg-type]
        return frames.ethernet(ends, frames.ETHERTYPE_IPV6, packet)

    return build


def _syn(ends: Ends) -> bytes:
    return frames.tcp(ends, SYN)


def _to(destination: dict[int, str], protocol: Callable[[Ends], tuple[int, bytes]]) -> Build:
    """To another address than the pod's, in the pod's frame."""

    def build(ends: Ends) -> bytes:
        other = dataclasses.replace(ends, pod=frames.address(destination[ends.family]))
        return frames.packet(other, *protocol(other))

    return build


def _icmp(ends: Ends) -> int:
    return frames.ICMP if ends.family == 4 else frames.ICMPV6


def _ethertype(ethertype: int) -> Build:
    return lambda ends: frames.ethernet(ends, ethertype, bytes(46))


def _tagged(tags: tuple[int, ...]) -> Build:
    return lambda ends: frames.packet(ends, frames.TCP, _syn(ends), tags=tags)


def _wrong_ethertype(ends: Ends) -> bytes:
    plain = frames.segment(ends, SYN)
    other = frames.ETHERTYPE_IPV6 if ends.family == 4 else frames.ETHERTYPE_IPV4
    return plain[:12] + other.to_bytes(2, "big") + plain[14:]


def _wrong_version(ends: Ends) -> bytes:
    plain = bytearray(frames.segment(ends, SYN))
    plain[14] = 0x50 | (plain[14] & 0x0F)
    return bytes(plain)


def _atomic(last: int, payload: Callable[[Ends], bytes]) -> Callable[[Ends], bytes]:
    def build(ends: Ends) -> bytes:
        header = frames.fragment_header(last, 0, more=False, identification=ends.source_port)
        return header + payload(ends)

    return build


def _reversed(build: Callable[[Ends], tuple[bytes, ...]]) -> Build:
    return lambda ends: build(ends)[::-1]


def _fragments(first_bytes: int) -> Callable[[Ends], tuple[bytes, ...]]:
    """A SYN with data in two fragments, the first of which contains this many bytes of it."""

    def build(ends: Ends) -> tuple[bytes, ...]:
        whole = frames.tcp(ends, SYN, options=bytes((1,)) * 4, data=b"fragment")
        parts = ((0, whole[:first_bytes]), (first_bytes, whole[first_bytes:]))
        return tuple(_fragment(ends, payload, offset) for offset, payload in parts)

    return build


def _fragment(ends: Ends, payload: bytes, offset: int) -> bytes:
    is_first = offset == 0
    if ends.family == 4:
        bits = frames.MORE_FRAGMENTS if is_first else offset // 8
        packet = frames.ipv4(ends, frames.TCP, payload, fragment=bits)
        return frames.ethernet(ends, frames.ETHERTYPE_IPV4, packet)
    header = frames.fragment_header(
        frames.TCP, offset, more=is_first, identification=ends.source_port
    )
    packet = frames.ipv6(ends, frames.FRAGMENT, header + payload)
    return frames.ethernet(ends, frames.ETHERTYPE_IPV6, packet)


def _fragment_cases() -> Iterator[Case]:
    for first_bytes in (8, 24):
        # Linux drops an IPv6 first fragment that ends within the TCP header (RFC 8200, 4.5).
        opening = BOTH if first_bytes == 24 else (4,)
        forwards = _fragments(first_bytes)
        for name, build in (("", forwards), ("-reversed", _reversed(forwards))):
            for family in BOTH:
                yield Case(
                    f"fragments-of-{first_bytes}{name}",
                    family,
                    build,
                    Verdict.DROP,
                    Reason.FRAGMENT,
                    opens=family in opening,
                )


def _tcp_cases() -> Iterator[Case]:
    node, established = Reason.NODE, Reason.ESTABLISHED
    data = b"injected"
    yield from _dropped("syn", node, _segment(SYN), opens=True)
    yield from _dropped("syn-psh", node, _segment(SYN | PSH), opens=True)
    yield from _dropped("syn-urg", node, _segment(SYN | URG), opens=True)
    yield from _dropped("syn-ecn", node, _segment(SYN | ECE | CWR), opens=True)
    yield from _dropped("syn-all-but-ack", node, _segment(SYN | PSH | URG | ECE | CWR), opens=True)
    yield from _dropped("syn-fin", node, _segment(SYN | FIN))
    yield from _dropped("syn-rst", node, _segment(SYN | RST))
    yield from _dropped("syn-with-data", node, _segment(SYN, data=data), opens=True)
    yield from _dropped("syn-options", node, _segment(SYN, options=BIG_OPTIONS), opens=True)
    padded: Build = lambda ends: frames.segment(ends, SYN) + bytes(64)  # noqa: E731
    yield from _dropped("syn-padded-frame", node, padded, opens=True)
    yield from _dropped("syn-ack", node, _segment(SYN | ACK))
    yield from _dropped("no-flags", node, _segment(0))
    yield from _dropped("data", node, _segment(ACK | PSH, data=data))
    yield from _dropped("data-behind-options", node, _segment(ACK, data=data, options=BIG_OPTIONS))
    yield from _dropped("fin-ack", node, _segment(FIN | ACK))
    yield from _dropped("short-offset", Reason.UNPARSABLE, _segment(SYN, header_words=4))
    yield from _passed("ack", established, _segment(ACK))
    yield from _passed("ack-options", established, _segment(ACK, options=bytes((1,)) * 12))
    padded_ack: Build = lambda ends: frames.segment(ends, ACK) + bytes(6)  # noqa: E731
    yield from _passed("ack-padded-frame", established, padded_ack)
    yield from _passed("rst", established, _segment(RST))
    yield from _passed("rst-ack", established, _segment(RST | ACK))


def _link_cases() -> Iterator[Case]:
    q, ad = frames.ETHERTYPE_VLAN, frames.ETHERTYPE_SERVICE_VLAN
    unparsable = Reason.UNPARSABLE
    for name, tags in {
        "priority-tag": (q,),
        "nested-tags": (q, q),
        "three-tags": (q, q, q),
        "service-tag": (ad,),
        "service-and-priority-tag": (ad, q),
    }.items():
        yield from _dropped(name, unparsable, _tagged(tags), opens=True)
    yield from _dropped("wrong-ethertype", unparsable, _wrong_ethertype)
    yield from _dropped("wrong-version", unparsable, _wrong_version)
    for name, ethertype in {"lldp": 0x88CC, "mpls": 0x8847, "pppoe": 0x8864, "llc": 0x0026}.items():
        yield from _dropped(name, unparsable, _ethertype(ethertype), families=(4,))
    yield from _passed("arp", Reason.ARP, frames.arp, families=(4,))


def _ipv4_cases() -> Iterator[Case]:
    four = (4,)
    options = _in_ipv4(_syn, options=BIG_OPTIONS)
    yield from _dropped("options", Reason.NODE, options, families=four, opens=True)
    for name, bits in {"dont-fragment": 0x4000, "reserved-bit": 0x8000}.items():
        build = _in_ipv4(_syn, fragment=bits)
        yield from _dropped(name, Reason.NODE, build, families=four, opens=True)
    for name, details in {
        "header-of-four-words": {"header_words": 4},
        "header-length-zero": {"header_words": 0},
        "total-shorter-than-header": {"total_length": 19},
    }.items():
        yield from _dropped(name, Reason.UNPARSABLE, _in_ipv4(_syn, **details), families=four)
    total_zero = _in_ipv4(_syn, total_length=0)
    yield from _dropped("total-length-zero", Reason.NODE, total_zero, families=four)
    igmp: Build = lambda ends: frames.ethernet(  # noqa: E731
        ends,
        frames.ETHERTYPE_IPV4,
        frames.ipv4(
            ends,
            frames.IGMP,
            bytes((0x11, 0, 0, 0)) + bytes(4),
            options=ROUTER_ALERT_IPV4,
            destination=frames.address(GROUP[4]),
        ),
    )
    yield from _passed("igmp", Reason.CONTROL, igmp, families=four)


def _ipv6_cases() -> Iterator[Case]:
    six = (6,)
    for count in range(1, 13):
        build = _in_ipv6(frames.DSTOPTS, lambda ends, n=count: frames.chain(n, 6, _syn(ends)))  # type: ignore[misc]
        reason = Reason.NODE if count <= 8 else Reason.UNPARSABLE
        yield from _dropped(f"{count}-headers", reason, build, families=six, opens=True)
    for name, first, payload, reason, opens in (
        ("hop-by-hop", 0, lambda e: frames.extension(6) + _syn(e), Reason.NODE, True),
        ("long-header", 60, lambda e: frames.extension(6, words=20) + _syn(e), Reason.NODE, False),
        ("routing-done", 43, lambda e: frames.routing(6, 0) + _syn(e), Reason.NODE, True),
        ("routing-left", 43, lambda e: frames.routing(6, 1) + _syn(e), Reason.UNPARSABLE, False),
        ("authentication", 51, lambda e: frames.authentication(6) + _syn(e), Reason.NODE, False),
        ("no-next-header", 59, _syn, Reason.UNPARSABLE, False),
        ("mobility", 135, lambda e: frames.extension(6) + _syn(e), Reason.UNPARSABLE, False),
        ("experiment", 253, lambda e: frames.extension(6) + _syn(e), Reason.UNPARSABLE, False),
        ("atomic-fragment", 44, _atomic(6, _syn), Reason.FRAGMENT, True),
        (
            "header-in-fragment",
            44,
            _atomic(60, lambda e: frames.extension(6) + _syn(e)),
            Reason.UNPARSABLE,
            True,
        ),
        (
            "header-before-fragment",
            60,
            lambda e: frames.extension(44) + _atomic(6, _syn)(e),
            Reason.FRAGMENT,
            True,
        ),
    ):
        yield from _dropped(name, reason, _in_ipv6(first, payload), families=six, opens=opens)
    jumbo = _in_ipv6(frames.TCP, _syn, payload_length=0)
    yield from _dropped("payload-length-zero", Reason.NODE, jumbo, families=six)
    short = _in_ipv6(60, lambda e: frames.extension(6) + _syn(e), payload_length=4)
    yield from _dropped("payload-ends-in-header", Reason.UNPARSABLE, short, families=six)


def _destination_cases() -> Iterator[Case]:
    def syn(ends: Ends) -> tuple[int, bytes]:
        return frames.TCP, _syn(ends)

    stray = Reason.STRAY
    yield from _dropped("to-stranger", stray, _to(STRANGER, syn))
    yield from _dropped("to-group", stray, _to(GROUP, syn))
    yield from _dropped("to-loopback", stray, _to(NODE_LOCAL, syn))
    error = {4: 3, 6: 1}
    # A client behind a pod that routes.
    yield from _passed(
        "icmp-error-to-stranger",
        Reason.CONTROL,
        _to(STRANGER, lambda ends: (_icmp(ends), frames.icmp(ends, error[ends.family]))),
    )


def _control_cases() -> Iterator[Case]:
    def message(type_: int) -> Build:
        return lambda ends: frames.packet(ends, _icmp(ends), frames.icmp(ends, type_))

    def group_message(type_: int) -> Build:
        return _to(GROUP, lambda ends: (frames.ICMPV6, frames.icmp(ends, type_)))

    control = Reason.CONTROL
    for type_ in (3, 11, 12):
        yield from _passed(f"icmp-{type_}", control, message(type_), families=(4,))
    for type_ in (1, 2, 3, 4):
        yield from _passed(f"icmp-{type_}", control, message(type_), families=(6,))
    for type_ in (130, 131, 132, 133, 134, 135, 136, 143):
        yield from _passed(f"icmp-{type_}", control, group_message(type_), families=(6,))
    mld: Build = lambda ends: frames.ethernet(  # noqa: E731
        ends,
        frames.ETHERTYPE_IPV6,
        frames.ipv6(
            ends,
            frames.HOPOPTS,
            ROUTER_ALERT_IPV6 + frames.icmp(ends, 143),
            destination=frames.address("ff02::16"),
            hop_limit=1,
        ),
    )
    yield from _passed("mld-behind-router-alert", control, mld, families=(6,))
    for family, type_ in ((4, 5), (6, 137)):
        yield from _dropped("redirect", Reason.NODE, message(type_), families=(family,))
    yield from _dropped("echo", Reason.NODE, message(8), families=(4,))
    yield from _dropped("echo", Reason.NODE, message(128), families=(6,))
    datagram: Build = lambda ends: frames.packet(ends, frames.UDP, frames.udp(ends))  # noqa: E731
    yield from _dropped("udp", Reason.NODE, datagram)


CASES: tuple[Case, ...] = (
    *_tcp_cases(),
    *_link_cases(),
    *_ipv4_cases(),
    *_ipv6_cases(),
    *_fragment_cases(),
    *_destination_cases(),
    *_control_cases(),
)
