"""One build of the plugin for all tests."""

import pathlib

import pytest

from tests.cni import calling


@pytest.fixture(scope="session")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return calling.build(tmp_path_factory.mktemp("cni") / "podgate-cni")
