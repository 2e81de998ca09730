"""Many interfaces of the kind that pods have, all of them with their other end beside it."""

import pyroute2

_PREFIX = "crowd"


class Crowd:
    """veth pairs; `ifindexes` are the node's sides. A context manager."""

    def __init__(self, size: int) -> None:
        self._size = size
        self.ifindexes: list[int] = []

    def __enter__(self) -> "Crowd":
        with pyroute2.IPRoute() as netlink:
            for number in range(self._size):
                netlink.link(
                    "add",
                    ifname=f"{_PREFIX}{number}",
                    kind="veth",
                    peer={"ifname": f"{_PREFIX}p{number}"},
                )
            self.ifindexes = [
                link["index"]
                for link in netlink.get_links()
                if str(link.get("ifname")).removeprefix(_PREFIX).isdecimal()
            ]
        return self

    def __exit__(self, *_: object) -> None:
        with pyroute2.IPRoute() as netlink:
            for ifindex in self.ifindexes:
                netlink.link("del", index=ifindex)
