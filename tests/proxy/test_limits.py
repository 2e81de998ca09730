"""The table of docs/proxy.md that marks tests of what a backend cannot do."""

import pytest

from tests.proxy import limits

_ABILITIES = ("one endpoint for a client by every address", "affinity that ends with its time")


@pytest.mark.parametrize("ability", _ABILITIES)
def test_only_ipvs_has_limits_that_tests_know(ability: str) -> None:
    assert [limits.limit(name, ability) for name in ("ebpf", "nft", "iptables")] == [None] * 3
    assert limits.limit("ipvs", ability) is not None


def test_unknown_ability_is_an_error() -> None:
    with pytest.raises(KeyError):
        limits.limit("nft", "flies")
