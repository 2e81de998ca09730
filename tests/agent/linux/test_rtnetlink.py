"""Route netlink."""

import asyncio
from typing import Any

from agent.linux.rtnetlink import SharedIPRoute


async def test_first_requests_of_several_tasks_share_one_transport() -> None:
    loop = asyncio.get_running_loop()
    create = loop.create_datagram_endpoint
    transports = []

    async def counted(*args: Any, **options: Any) -> Any:
        made = await create(*args, **options)
        transports.append(made)
        return made

    loop.create_datagram_endpoint = counted  # type: ignore[method-assign]
    netlink = SharedIPRoute()
    try:
        answers = await asyncio.gather(*(netlink.link("get", index=1) for _ in range(5)))
    finally:
        netlink.close()
    assert [link["index"] for (link,) in answers] == [1] * 5
    assert len(transports) == 1
