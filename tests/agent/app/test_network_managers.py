"""Network managers are kept off the relay's interfaces, where they are."""

import pathlib

from agent.app import network_managers

NM = "NetworkManager/conf.d/podgate-relay.conf"
NETWORKD = "systemd/network/00-podgate-relay.network"


def files(run: pathlib.Path) -> set[str]:
    return {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()}


def test_only_installed_services_are_configured(tmp_path: pathlib.Path) -> None:
    network_managers.exclude_relay(tmp_path)
    assert files(tmp_path) == set()
    (tmp_path / "NetworkManager").mkdir()
    network_managers.exclude_relay(tmp_path)
    assert files(tmp_path) == {NM}
    assert "match-device=interface-name:podgate-relay*\nmanaged=0" in (tmp_path / NM).read_text()
    (tmp_path / NM).write_text("[other]\n")
    network_managers.exclude_relay(tmp_path)
    assert "[device-podgate-relay]" in (tmp_path / NM).read_text()


def test_networkd_is_found_by_either_directory(tmp_path: pathlib.Path) -> None:
    (tmp_path / "systemd/netif").mkdir(parents=True)
    network_managers.exclude_relay(tmp_path)
    assert files(tmp_path) == {NETWORKD}
    assert "Name=podgate-relay*" in (tmp_path / NETWORKD).read_text()
    assert "Unmanaged=yes" in (tmp_path / NETWORKD).read_text()


def test_files_are_written_once_and_removed_again(tmp_path: pathlib.Path) -> None:
    (tmp_path / "NetworkManager").mkdir()
    (tmp_path / "systemd/network").mkdir(parents=True)
    network_managers.exclude_relay(tmp_path)
    first = (tmp_path / NM).stat().st_ino
    network_managers.exclude_relay(tmp_path)
    assert (tmp_path / NM).stat().st_ino == first
    network_managers.remove_exclusion(tmp_path)
    network_managers.remove_exclusion(tmp_path)
    assert files(tmp_path) == set()


def test_directory_that_cannot_be_written_is_no_reason_to_fail(tmp_path: pathlib.Path) -> None:
    (tmp_path / "NetworkManager").mkdir()
    (tmp_path / "NetworkManager/conf.d").write_text("a file")
    (tmp_path / "systemd/netif").mkdir(parents=True)
    network_managers.exclude_relay(tmp_path)
    assert files(tmp_path) == {"NetworkManager/conf.d", NETWORKD}
