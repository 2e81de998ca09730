"""Kubeconfigs that cannot be used, in one sentence."""

import logging
import pathlib

import pytest

from agent.kube import connection


@pytest.mark.parametrize("names", [["none"], ["none", "nor-this"]])
def test_missing_kubeconfig_is_named(
    names: list[str], tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    paths = ":".join(str(tmp_path / name) for name in names)
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(connection.ConnectionConfigError, match="no such file"),
    ):
        connection.read(paths)
    assert caplog.records == []
