"""The nft command: one script is one transaction.

The command, not its library: the library's calls cannot be cancelled, and a commit waits while
another process holds the kernel's lock; a child process can be killed. A crash in netlink parsing
also stays outside the agent. A call takes 3 to 6 ms, compared with 10 to 20 to attach a gate.
"""

from agent import batches
from agent.errors import PodgateError
from agent.linux import commands
from bpf.netlink import HEADER_BYTES, RequestSocket, attributes

# include/uapi/linux/netfilter/nfnetlink.h, nf_tables.h
NETLINK_NETFILTER = 12
NFNL_SUBSYS_NFTABLES = 10
_GETGEN = 16
_GENERATION = 1
_NFGENMSG_BYTES = 4

# A commit waits for an RCU grace period and for other writers; kube-proxy's largest take seconds.
_TIMEOUT_SECONDS = 20.0


class NftError(PodgateError):
    """nft or the kernel failed; nothing was changed. The text is one line of its error message."""


class NftMissingError(NftError):
    """This machine has no nft command."""


async def apply(script: str, *, only_check: bool = False) -> None:
    """Apply the whole script, or nothing of it. Raises `NftError` or `TimeoutError`."""
    await _run(["-f", "-", *(["--check"] if only_check else [])], script)


async def query(*arguments: str) -> str:
    """The output of nft. Raises `NftError` or `TimeoutError`."""
    return await _run(list(arguments), "")


async def generation() -> int | None:
    """The number of this network namespace's ruleset: each transaction of any program makes it one
    more, and nothing else does (nf_tables_commit). None if it cannot be read.

    It may wait for a transaction, so it runs in a thread.
    """
    try:
        return await batches.in_thread(_read_generation)
    except OSError:
        return None


def _read_generation() -> int:
    sock = RequestSocket(NETLINK_NETFILTER)
    try:
        (message,) = sock.change(NFNL_SUBSYS_NFTABLES << 8 | _GETGEN, 0, bytes(_NFGENMSG_BYTES))
    finally:
        sock.close()
    return int.from_bytes(attributes(message, HEADER_BYTES + _NFGENMSG_BYTES)[_GENERATION], "big")


async def _run(arguments: list[str], script: str) -> str:
    try:
        ran = await commands.run("nft", *arguments, text=script, limit_seconds=_TIMEOUT_SECONDS)
    except TimeoutError:  # it is an OSError, too
        raise
    except FileNotFoundError as error:
        raise NftMissingError("there is no nft command") from error
    except OSError as error:
        raise NftError(f"nft cannot be started ({error.strerror})") from error
    if ran.status != 0:
        raise NftError(_first_error(ran.errors, ran.status))
    return ran.output


def _first_error(text: str, code: int) -> str:
    for line in text.splitlines():
        _, found, message = line.partition("Error: ")
        if found:
            return message.strip()
    return text.strip().partition("\n")[0] or f"nft ended with {code}"
