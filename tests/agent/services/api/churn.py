"""A cluster's half hour: changes of services and slices with a fixed seed.

Most of what the API server sends does not affect one node: hints of slices for other zones, target
references, labels, services that another proxy serves, what is written again as it was.
"""

import random
from collections.abc import Iterator
from typing import Final, NamedTuple

from agent.services.api import objects
from tests.agent.services.api.making import Json, endpoint_json, read, service_json, slice_json

SERVICES: Final = 1000
ENDPOINTS_EACH: Final = 5
SECONDS: Final = 30 * 60
EVENTS_PER_SECOND: Final = 55.0
"""With the bursts about what one run of kpng saw: 130,942 in 30 minutes."""
SHARE_THAT_MATTERS: Final = 0.01
SEED: Final = 4188


class Change(NamedTuple):
    """One event of a watch. at: seconds since the start."""

    at: float
    old: objects.EndpointSlice
    new: objects.EndpointSlice
    matters: bool


def services() -> Iterator[objects.ApiService]:
    for number in range(SERVICES):
        address = f"198.18.{number // 250}.{number % 250 + 1}"
        content = service_json(name(number), clusterIP=address, clusterIPs=[address])
        yield read(content, objects.ApiService)


def first_slices() -> list[Json]:
    """One for each service, in two zones, all ready."""
    return [
        slice_json(
            *(
                endpoint_json(
                    f"198.19.{number // 50}.{number % 50 * ENDPOINTS_EACH + index + 1}",
                    node=f"node{(number + index) % 50}",
                    zones=["a"] if index < 3 else ["b"],
                    uid=f"{number}-{index}-0",
                )
                for index in range(ENDPOINTS_EACH)
            ),
            name=f"{name(number)}-1",
            service=name(number),
        )
        for number in range(SERVICES)
    ]


def name(number: int) -> str:
    return f"service-{number:04}"


def as_slice(content: Json) -> objects.EndpointSlice:
    found: objects.EndpointSlice = read(content, objects.EndpointSlice)
    return found


def changes(now: list[Json]) -> Iterator[Change]:
    """Events at random moments, in bursts now and then. now: what is there at first; changed."""
    chance = random.Random(SEED)
    known = [as_slice(content) for content in now]
    at = 0.0
    while True:
        at += chance.expovariate(EVENTS_PER_SECOND)
        if at >= SECONDS:
            return
        # A roll-out's events come together: one in ten comes with up to five more.
        for _ in range(chance.randint(2, 6) if chance.random() < 0.1 else 1):
            number = chance.randrange(SERVICES)
            matters = chance.random() < SHARE_THAT_MATTERS
            if matters:
                _toggle(now[number]["endpoints"][chance.randrange(3)])
            else:
                _change_for_others(now[number], chance)
            before, known[number] = known[number], as_slice(now[number])
            yield Change(at, before, known[number], matters)


def _toggle(endpoint: Json) -> None:
    endpoint["conditions"]["ready"] = not endpoint["conditions"]["ready"]


def _change_for_others(content: Json, chance: random.Random) -> None:
    endpoint = content["endpoints"][3 + chance.randrange(2)]
    match chance.randrange(4):
        case 0:
            # A pod of the other zone, which no connection from here goes to while ours has some.
            endpoint["targetRef"]["uid"] += "x"
        case 1:
            content["metadata"]["labels"]["example.com/touched"] = str(chance.random())
        case 2:
            endpoint["nodeName"] = f"node{chance.randrange(50, 99)}"
        case _:
            pass
