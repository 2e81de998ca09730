"""A mirror of a source's objects, which may be many, leaves the loop to others meanwhile."""

import asyncio
from collections.abc import Callable

import pytest

from agent.services.api import stretches
from agent.services.api.object_source import Key, ObjectMirror, key_of
from agent.services.api.objects import ApiService, EndpointSlice
from tests.agent.services.api.making import endpoint_slice, service

NAMES = ("one", "two", "three")


def services() -> dict[Key, ApiService]:
    return {key_of(one): one for one in (service(name) for name in NAMES)}


def slices() -> dict[Key, EndpointSlice]:
    return {key_of(one): one for one in (endpoint_slice(name=name) for name in NAMES)}


@pytest.mark.parametrize("made", [services, slices])
@pytest.mark.parametrize("is_there", [False, True], ids=["added", "removed"])
async def test_other_tasks_run_between_objects(
    monkeypatch: pytest.MonkeyPatch,
    made: Callable[[], dict[Key, ApiService] | dict[Key, EndpointSlice]],
    *,
    is_there: bool,
) -> None:
    """Each of them takes a stretch of its own here."""
    monkeypatch.setattr(stretches, "_STRETCH_SECONDS", 0.0)
    mirror = ObjectMirror(lambda *_: None, lambda *_: None)
    both = (services(), {}) if made is services else ({}, slices())
    if is_there:
        mirror.seed(list(both[0].values()), list(both[1].values()))
        both = ({}, {})
    task = asyncio.create_task(mirror.replace(*both))
    turns = 0
    while not task.done():
        await asyncio.sleep(0)
        turns += 1
    assert turns > len(NAMES)
    assert (mirror.services, mirror.slices) == both
