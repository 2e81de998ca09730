"""What podgate needs of the machine before it starts."""

import pathlib

from agent.app import preflight


def _missing(tmp_path: pathlib.Path, effective: str) -> list[str]:
    status = tmp_path / "status"
    status.write_text(f"Name:\tpython3\nCapPrm:\t000001ffffffffff\nCapEff:\t{effective}\n")
    return preflight.missing_capabilities(status)


def test_all_capabilities_are_enough(tmp_path: pathlib.Path) -> None:
    assert _missing(tmp_path, "000001ffffffffff") == []


def test_five_capabilities_are_enough(tmp_path: pathlib.Path) -> None:
    assert _missing(tmp_path, f"{1 << 11 | 1 << 12 | 1 << 13 | 1 << 19 | 1 << 21:016x}") == []


def test_what_a_container_has_without_asking_is_not_enough(tmp_path: pathlib.Path) -> None:
    # containerd's default set.
    assert _missing(tmp_path, "00000000a80425fb") == [
        *("CAP_NET_BROADCAST", "CAP_NET_ADMIN", "CAP_SYS_PTRACE", "CAP_SYS_ADMIN"),
    ]
