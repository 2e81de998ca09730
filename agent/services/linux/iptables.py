"""The iptables commands, of either variant: over nftables, or the legacy one of its own tables."""

import enum

from agent.errors import PodgateError
from agent.linux import commands

# A restore of ten thousand services takes seconds, and legacy waits for other programs.
_TIMEOUT_SECONDS = 60.0
# /run/xtables.lock, which excludes other programs of the legacy variant.
_LOCK_SECONDS = 20


class IptablesVariant(enum.Enum):
    """Which of the two kernel interfaces; DEFAULT is what the system's `iptables` is."""

    DEFAULT = ""
    NFT = "-nft"
    LEGACY = "-legacy"


class IptablesError(PodgateError):
    """iptables or the kernel failed; the table named last was not changed."""


class IptablesMissingError(IptablesError):
    """This machine has no such command."""


async def save(version: int, variant: IptablesVariant) -> str:
    """All tables that exist, as `iptables-save` writes them. version: of IP.

    Raises `IptablesError`.
    """
    return await _run(_command(version, variant, "save"))


async def restore(version: int, variant: IptablesVariant, script: str) -> None:
    """Apply a script of `iptables-restore`, each table in one step; other chains stay.

    Raises `IptablesError`: the tables before the wrong one are changed, and it and those after it
    are not.
    """
    command = _command(version, variant, "restore")
    await _run(command, "--wait", str(_LOCK_SECONDS), "--noflush", script=script)


def _command(version: int, variant: IptablesVariant, action: str) -> str:
    return f"{'ip6tables' if version == 6 else 'iptables'}{variant.value}-{action}"


async def _run(command: str, *arguments: str, script: str = "") -> str:
    try:
        ran = await commands.run(command, *arguments, text=script, limit_seconds=_TIMEOUT_SECONDS)
    except TimeoutError as error:
        raise IptablesError(f"{command} took more than {_TIMEOUT_SECONDS:.0f} s") from error
    except FileNotFoundError as error:
        raise IptablesMissingError(f"there is no {command} command") from error
    except OSError as error:
        raise IptablesError(f"{command} cannot be started ({error.strerror})") from error
    if ran.status != 0:
        lines = [line for line in ran.errors.splitlines() if line.strip()]
        raise IptablesError(lines[0] if lines else f"{command} ended with {ran.status}")
    return ran.output
