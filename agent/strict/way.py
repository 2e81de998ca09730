"""The way from the host to a relay: tried by connecting, not concluded from what was set up.

The kubelet's connections to pods in strict leave the node by the relay's interface. A firewall in
the node's OUTPUT, a lost route, address or link would let every probe of the node time out. So the
agent connects to an address of the relay at which no pod is: the relay rejects the SYN, and its RST
shows that packets pass both ways and that the relay responds. The relay's gate admits the agent's
cgroup to that port.
"""

import asyncio
import contextlib
import errno
import json
import os
import socket
from collections.abc import Sequence

from agent.linux import nft
from agent.relay.interfaces import PREFIX, WAY_PORT
from bpf.abi import IPAddress
from probes.netns import SHORTAGES

# The relay responds within a millisecond. On a busy node it waits for a CPU, at a higher priority
# than others have.
_ANSWER_SECONDS = 0.2
_NAMED_CHAINS = 3
# The relay's own response, and errors that show nothing of the way.
_UNKNOWN = SHORTAGES | {errno.ECONNREFUSED, errno.ENOTCONN}
# What leaves the node first; answers of the relay come in.
_HOOKS = ("output", "postrouting", "input")


async def find_problem(addresses: Sequence[IPAddress]) -> str:
    """Why a connection to the relay does not arrive or is not answered, as a clause; "" if all are.

    addresses: `RangeShare.way` of each family, tried at the same time.
    """
    results = await asyncio.gather(*map(_try, addresses))
    return next(filter(None, results), "")


async def _try(address: IPAddress) -> str:
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    try:
        sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    except OSError:
        return ""  # this process has no descriptor or memory left
    with sock:
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                await asyncio.get_running_loop().sock_connect(sock, (str(address), WAY_PORT))
                # asyncio takes EAGAIN for a connect that has started.
                sock.getpeername()
        except TimeoutError:
            # The response may have come while this process waited for a CPU.
            if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == errno.ECONNREFUSED:
                return ""
            return f"packets from the node to {address} are not answered"
        except OSError as error:
            # A firewall's drop is none of these.
            if error.errno in _UNKNOWN:
                return ""
            reason = os.strerror(error.errno) if error.errno else str(error)
            return f"the node cannot send to {address} ({reason})"
    return f"another process accepts connections to {address}"


async def suspects() -> str:
    """A clause that names what may drop such packets, with a space before it; "" if unknown."""
    chains = []
    with contextlib.suppress(nft.NftError, TimeoutError, ValueError, KeyError):
        listed = json.loads(await nft.query("--json", "list", "chains"))
        for entry in listed["nftables"]:
            chain = entry.get("chain", {})
            if chain.get("type") == "filter" and chain.get("hook") in _HOOKS:
                name = (chain["family"], chain["table"], chain["name"])
                is_closed = chain.get("policy") == "drop"
                chains.append((not is_closed, _HOOKS.index(chain["hook"]), name))
    if not chains:
        return f"; rules of the node must admit packets to {PREFIX}*"
    named = []
    for is_open, _, name in sorted(chains)[:_NAMED_CHAINS]:
        detail = await _targets(*name) if is_open else ", policy drop"
        named.append(f"'{' '.join(name)}{detail}'")
    return f"; check the nftables chains {', '.join(named)}: they must admit packets to {PREFIX}*"


async def _targets(family: str, table: str, chain: str) -> str:
    """To which chains this one jumps: those of another program, such as Calico's cali-OUTPUT."""
    targets: dict[str, None] = {}
    with contextlib.suppress(nft.NftError, TimeoutError, ValueError, KeyError, TypeError):
        listed = json.loads(await nft.query("--json", "list", "chain", family, table, chain))
        for entry in listed["nftables"]:
            for expression in entry.get("rule", {}).get("expr", ()):
                for verdict in ("jump", "goto"):
                    if verdict in expression:
                        targets[expression[verdict]["target"]] = None
    return f" to {', '.join(list(targets)[:_NAMED_CHAINS])}" if targets else ""
