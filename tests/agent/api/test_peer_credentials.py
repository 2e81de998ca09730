"""Users of a socket are remembered as long as there is room for them."""

import pathlib

import pytest

from agent.api import peer_credentials
from agent.api.peer_credentials import PeerCredentialProxy


async def test_user_keeps_its_pace_until_others_need_its_place(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_credentials, "_MAX_USERS", 2)
    proxy = PeerCredentialProxy(tmp_path / "public.sock", tmp_path / "inner.sock")
    first, second = proxy._user(1), proxy._user(2)
    assert proxy._user(1) is first
    proxy._user(3)
    assert proxy._user(1) is first
    assert proxy._user(2) is not second


async def test_connected_user_keeps_its_place(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_credentials, "_MAX_USERS", 2)
    proxy = PeerCredentialProxy(tmp_path / "public.sock", tmp_path / "inner.sock")
    first = proxy._user(1)
    first.connected()
    for uid in (2, 3, 4):
        proxy._user(uid)
    assert proxy._user(1) is first
