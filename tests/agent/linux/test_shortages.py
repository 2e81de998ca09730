"""Without a free descriptor nothing is known: an error, and not that there is nothing."""

from collections.abc import Awaitable, Callable

import pytest

from agent.gates import gate_watch
from agent.linux import own_addresses, pod_network, rtnetlink
from agent.linux.nft_monitor import NftMonitor
from tests.processes import no_descriptors

_LOOPBACK = 1


@pytest.mark.parametrize(
    "read",
    [
        lambda: rtnetlink.find(_LOOPBACK),
        lambda: pod_network.netns_number("/proc/self/ns/net"),
        lambda: pod_network.PodNetworkReader().exists(_LOOPBACK),
        lambda: own_addresses.read([]),
        lambda: NftMonitor(lambda deleted: None).run(),
    ],
    ids=["link", "namespace", "interface", "addresses of the node", "nftables"],
)
async def test_reader_without_a_descriptor_raises(read: Callable[[], Awaitable[object]]) -> None:
    with pytest.raises(OSError, match="Too many open files"), no_descriptors():
        await read()


def test_interface_of_a_process_without_descriptors_counts_as_there() -> None:
    """A gate that cannot be put back is reported unless its interface is gone."""
    assert not gate_watch._exists(1 << 30)
    with no_descriptors():
        assert gate_watch._exists(_LOOPBACK)
