"""What a network namespace has, by the answers of nft."""

import json
import pathlib

import pytest

from agent.default_deny import installed
from agent.default_deny.installed import Admission
from agent.linux import nft


def answer(monkeypatch: pytest.MonkeyPatch, texts: dict[tuple[str, ...], str | Exception]) -> None:
    async def query(*arguments: str) -> str:
        found = texts[arguments]
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(nft, "query", query)


@pytest.mark.parametrize(
    ("tables", "expected"),
    [
        ("", ()),
        ("table bridge podgate\ntable ip nat\ntable inet podgate\n", ("inet", "bridge")),
        ("table inet podgate2\ntable ip podgate\ntable bridge podgate\n", ("bridge",)),
    ],
)
async def test_families_are_those_with_a_table(
    monkeypatch: pytest.MonkeyPatch, tables: str, expected: tuple[str, ...]
) -> None:
    answer(monkeypatch, {("list", "tables"): tables})
    assert await installed.families() == expected


KUBELET = ("list", "chain", "inet", "podgate", "kubelet")
OPENING = ("list", "chain", "inet", "podgate", "opening")
ALIVE = ("--json", "list", "set", "inet", "podgate", "alive")


def alive(**content: object) -> str:
    return json.dumps({"nftables": [{"metainfo": {}}, {"set": {"name": "alive", **content}}]})


@pytest.mark.parametrize(
    ("kubelet", "opening", "is_alive", "expected"),
    [
        ("", "", alive(), Admission("", False, False, False, False)),
        (
            'socket cgroupv2 level 2 "system.slice/kubelet.service" accept',
            "ct state new goto tag",
            alive(elem=[{"elem": {"val": "ipv4", "expires": 5}}]),
            Admission("/system.slice/kubelet.service", False, False, True, True),
        ),
        (
            "jump orphaned\nmeta l4proto tcp meta priority 1:2 meta priority set none accept",
            "meta l4proto tcp accept",
            alive(elem=[]),
            Admission("", True, True, False, False),
        ),
    ],
)
async def test_admission_is_read_from_the_chains_and_the_heartbeat_s_set(
    monkeypatch: pytest.MonkeyPatch,
    kubelet: str,
    opening: str,
    is_alive: str,
    expected: Admission,
) -> None:
    answer(monkeypatch, {KUBELET: kubelet, OPENING: opening, ALIVE: is_alive})
    assert await installed.admission() == expected


@pytest.mark.parametrize(
    ("error", "is_raised"),
    [(nft.NftError("No such file"), False), (nft.NftMissingError("there is no nft"), True)],
)
async def test_sets_of_a_missing_table_are_none_and_a_missing_nft_is_an_error(
    monkeypatch: pytest.MonkeyPatch, error: Exception, is_raised: bool
) -> None:
    names = [("--json", "list", "set", "inet", "podgate", name) for name in ("gated", "not_pods")]
    answer(monkeypatch, {names[0]: alive(elem=["lo"]), names[1]: error})
    if is_raised:
        with pytest.raises(nft.NftMissingError):
            await installed.interface_sets()
    else:
        assert await installed.interface_sets() is None
    answer(monkeypatch, {names[0]: alive(elem=["lo"]), names[1]: alive()})
    assert await installed.interface_sets() == ({1}, set())


@pytest.mark.parametrize(
    ("content", "expected"), [("0\n", False), ("1\n", True), ("x", False), (None, False)]
)
def test_connections_are_tracked_where_some_are_counted(
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    content: str | None,
    expected: bool,
) -> None:
    path = tmp_path / "nf_conntrack_count"
    if content is not None:
        path.write_text(content)
    monkeypatch.setattr(installed, "_CONNTRACK_COUNT", path)
    assert installed.tracks_connections() is expected
