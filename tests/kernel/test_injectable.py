"""Which interfaces the node can inject by."""

from collections.abc import Iterator

import pytest

from bpf import abi, loader
from bpf.injectable import InjectableMap

pytestmark = pytest.mark.kernel

LAST = abi.INJECTABLE_IFINDEXES - 1


@pytest.fixture
def origin(loaded: loader.Loaded) -> Iterator[InjectableMap]:
    made = InjectableMap(loaded)
    yield made
    for ifindex in made.marked():
        made.mark(ifindex, is_node_sent=False)


def test_nothing_is_marked_at_first(origin: InjectableMap) -> None:
    assert origin.marked() == set()


@pytest.mark.parametrize("ifindex", [1, 63, 64, 65, 1000, LAST])
def test_mark_and_unmark(origin: InjectableMap, ifindex: int) -> None:
    origin.mark(ifindex, is_node_sent=True)
    assert origin.is_marked(ifindex)
    assert origin.marked() == {ifindex}
    origin.mark(ifindex, is_node_sent=False)
    assert not origin.is_marked(ifindex)
    assert origin.marked() == set()


def test_neighbours_in_a_word_are_left_alone(origin: InjectableMap) -> None:
    for ifindex in (64, 65, 127, 128):
        origin.mark(ifindex, is_node_sent=True)
    origin.mark(65, is_node_sent=False)
    origin.mark(65, is_node_sent=False)
    assert origin.marked() == {64, 127, 128}


@pytest.mark.parametrize("ifindex", [0, -1, LAST + 1, 1 << 31])
def test_number_beyond_the_map_is_one_sentence(origin: InjectableMap, ifindex: int) -> None:
    with pytest.raises(ValueError, match=f"interface number {ifindex} is beyond the origin map"):
        origin.mark(ifindex, is_node_sent=True)
    assert origin.marked() == set()


@pytest.mark.parametrize("ifindex", [0, LAST + 1])
def test_number_beyond_the_map_is_not_marked(origin: InjectableMap, ifindex: int) -> None:
    assert not origin.is_marked(ifindex)
