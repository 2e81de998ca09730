"""Injectable interfaces: the map of interfaces by which the host can inject packets."""

from collections.abc import Iterator

import pytest

from bpf import abi, loader
from bpf.injectable import InjectableMap

pytestmark = pytest.mark.kernel

LAST = abi.INJECTABLE_IFINDEXES - 1


@pytest.fixture
def injectable(loaded: loader.Loaded) -> Iterator[InjectableMap]:
    made = InjectableMap(loaded)
    yield made
    for ifindex in made.marked():
        made.mark(ifindex, is_node_sent=False)


def test_nothing_is_marked_at_first(injectable: InjectableMap) -> None:
    assert injectable.marked() == set()


@pytest.mark.parametrize("ifindex", [1, 63, 64, 65, 1000, LAST])
def test_mark_and_unmark(injectable: InjectableMap, ifindex: int) -> None:
    injectable.mark(ifindex, is_node_sent=True)
    assert injectable.marked() == {ifindex}
    injectable.mark(ifindex, is_node_sent=False)
    assert injectable.marked() == set()


def test_neighbours_in_a_word_are_left_alone(injectable: InjectableMap) -> None:
    for ifindex in (64, 65, 127, 128):
        injectable.mark(ifindex, is_node_sent=True)
    injectable.mark(65, is_node_sent=False)
    injectable.mark(65, is_node_sent=False)
    assert injectable.marked() == {64, 127, 128}


@pytest.mark.parametrize("ifindex", [0, -1, LAST + 1, 1 << 31])
def test_number_beyond_the_map_is_one_sentence(injectable: InjectableMap, ifindex: int) -> None:
    words = f"interface number {ifindex} is beyond the injectable map"
    with pytest.raises(ValueError, match=words):
        injectable.mark(ifindex, is_node_sent=True)
    assert injectable.marked() == set()
