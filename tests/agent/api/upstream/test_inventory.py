"""Every case of the recorded files of Kubernetes has a counterpart of its name, or a reason."""

import importlib
import itertools
import pathlib

import pytest

from tests.agent.api.upstream import inventory
from tests.agent.api.upstream.inventory import UpstreamFile

_HERE = pathlib.Path(__file__).parent


def _declared() -> list[UpstreamFile]:
    """Of all test modules of this directory."""
    modules = [
        importlib.import_module(f"{__package__}.{path.stem}")
        for path in sorted(_HERE.glob("test_*.py"))
        if path.stem != "test_inventory"
    ]
    return [
        value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, UpstreamFile)
    ]


DECLARED = {one.path: one for one in _declared()}


def test_every_recorded_file_has_a_module() -> None:
    assert DECLARED.keys() == inventory.recorded().keys()


@pytest.mark.parametrize("path", inventory.recorded())
def test_every_recorded_case_has_a_counterpart_or_a_reason(path: str) -> None:
    recorded, ours = inventory.recorded()[path], DECLARED[path]
    ids = {
        *recorded,
        *(f"{test}/{name}" for test, names in recorded.items() for name in names),
    }
    assert ours.cases.keys() | ours.without.keys() <= ids, "not in Kubernetes"
    for test, names in recorded.items():
        if test in ours.without:
            assert test not in ours.cases
            continue
        without = [name for name in names if f"{test}/{name}" in ours.without]
        covered = ours.cases.get(test, [])
        assert sorted(itertools.chain(covered, without)) == sorted(names), test
        assert test in ours.cases or without, f"{test} has no counterpart"


GO = """\
func TestTable(t *testing.T) {
	cases := []struct{ name string }{{
		name: "first, \\"quoted\\"",
	}, {
		name:        "second",
	}}
	other := []string{
		"an argument",
	}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
	}
}

func TestMap(t *testing.T) {
	cases := map[string]struct{}{
		"a key": {
			name: "inner",
		},
		"a key": {
	}
	t.Run("literal", func(t *testing.T) {
}

func TestNumbered(t *testing.T) {
	// Case[0]: nothing
}

func helper(t *testing.T) {}
"""


def test_names_are_read_from_tables_maps_and_subtests() -> None:
    assert inventory.cases_of(GO) == {
        "TestTable": ['first, "quoted"', "second"],
        "TestMap": ["a key", "a key/inner", "a key#01", "literal"],
        "TestNumbered": ["Case[0]: nothing"],
    }
