"""Relays' interfaces on the host are known by their names."""

import socket

import pytest

from agent.relay import interfaces


@pytest.mark.parametrize(
    ("name", "slot"),
    [
        ("podgate-relay0", 0),
        ("podgate-relay12", 12),
        ("podgate-relay", None),
        ("podgate-relayx", None),
        ("podgate-relay-1", None),
        ("7", None),
        ("veth7", None),
    ],
)
def test_name_shows_whose_interface_it_is(name: str, slot: int | None) -> None:
    assert interfaces.slot_of(name) == slot
    assert interfaces.is_relay_interface(name) is (slot is not None)
    if slot is not None:
        assert interfaces.name_of(slot) == name


def test_interfaces_of_all_slots_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    present = {"podgate-relay0": 5, "podgate-relay7": 9, "veth7": 7}

    def if_nametoindex(name: str) -> int:
        if name not in present:
            raise OSError(19, "No such device")
        return present[name]

    monkeypatch.setattr(socket, "if_nametoindex", if_nametoindex)
    assert interfaces.present() == {5: "podgate-relay0", 9: "podgate-relay7"}
