"""Configures NetworkManager and systemd-networkd to ignore the relay's interfaces.

Both leave an interface alone that others have set up, unless a profile of the node's owner happens
to match it; then they would take its addresses and routes away. They read these files when they
start and when they reload, which is left to the operator.
"""

import pathlib

import structlog

from agent.logs import Event
from agent.relay.interfaces import PREFIX

log = structlog.get_logger(__name__)

# A section of its own (NetworkManager.conf(5), "device section"): the list `unmanaged-devices` is
# one for all files, and the last that sets it wins.
_NETWORK_MANAGER = f"""\
[device-podgate-relay]
match-device=interface-name:{PREFIX}*
managed=0
"""

# systemd.network(5). The first file in the order of names that matches is the one that counts.
_NETWORKD = f"""\
[Match]
Name={PREFIX}*

[Link]
Unmanaged=yes
"""

# By the directory that is there when the service runs (or, for networkd, may run).
_FILES = (
    ("NetworkManager", "NetworkManager/conf.d/podgate-relay.conf", _NETWORK_MANAGER),
    ("systemd/netif", "systemd/network/00-podgate-relay.network", _NETWORKD),
    ("systemd/network", "systemd/network/00-podgate-relay.network", _NETWORKD),
)
RUN = pathlib.Path("/run")


def exclude_relay(run: pathlib.Path = RUN) -> None:
    """Write the files for those services that are installed; problems are only logged."""
    for service, name, content in _FILES:
        path = run / name
        try:
            if (run / service).is_dir() and not _has_content(path, content):
                path.parent.mkdir(exist_ok=True)
                unfinished = path.with_suffix(".new")
                unfinished.write_text(content, encoding="ascii")
                unfinished.rename(path)
                log.info(Event.NETWORK_MANAGER_CONFIGURED, file=str(path))
        except OSError as error:
            log.warning(
                Event.NETWORK_MANAGER_NOT_CONFIGURED,
                file=str(path),
                error=str(error),
            )


def remove_exclusion(run: pathlib.Path = RUN) -> None:
    """Remove the files. Raises `OSError`."""
    for _, name, _ in _FILES:
        (run / name).unlink(missing_ok=True)


def _has_content(path: pathlib.Path, content: str) -> bool:
    try:
        return path.read_text(encoding="utf-8", errors="replace") == content
    except FileNotFoundError:
        return False
