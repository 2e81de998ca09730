"""One plugin more, and one less, in texts that are others'."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.cni import conflist
from agent.cni.conflist import ConflistError, InvalidConflistError

ENTRY = {"type": "podgate-cni"}
STRICT = {"type": "podgate-cni", "strictStart": True}

CALICO = """{
  "name": "k8s-pod-network",
  "cniVersion": "0.3.1",
  "plugins": [
    {
      "type": "calico",
      "policy": {"type": "k8s", "plugins": [1, [2]]},
      "text": "]}, \\"plugins\\": ["
    },
    {
      "type": "portmap",
      "snat": true,
      "capabilities": {"portMappings": true}
    }
  ]
}
"""


def test_plugin_is_added_last_and_the_rest_stays() -> None:
    text = conflist.with_entry(CALICO, ENTRY)
    assert text == CALICO.replace(
        '{"portMappings": true}\n    }\n', '{"portMappings": true}\n    },\n    ' + "{}\n"
    ).replace("{}\n", json.dumps(ENTRY) + "\n")
    assert conflist.has_entry(text)
    assert not conflist.has_entry(CALICO)


def test_list_with_the_plugin_is_unchanged() -> None:
    text = conflist.with_entry(CALICO, ENTRY)
    assert conflist.with_entry(text, ENTRY) == text


def test_other_options_replace_the_plugin() -> None:
    text = conflist.with_entry(conflist.with_entry(CALICO, ENTRY), STRICT)
    assert text == conflist.with_entry(CALICO, STRICT)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # Separated as the plugins before, on lines or not.
        (
            '{"cniVersion": "1.0.0", "name": "n", "plugins": [{"type": "x"}]}',
            '{"cniVersion": "1.0.0", "name": "n", "plugins": '
            '[{"type": "x"},{"type": "podgate-cni"}]}',
        ),
        (
            '{"cniVersion": "1.0.0", "name": "n", "plugins": [ {"type": "x"}, {"type": "y"} ]}',
            '{"cniVersion": "1.0.0", "name": "n", "plugins": '
            '[ {"type": "x"}, {"type": "y"}, {"type": "podgate-cni"} ]}',
        ),
        # Of several lists the last counts; other lists, and lists elsewhere, do not.
        (
            '{"cniVersion": "1.0.0", "name": "n", "plugins": [{"type": "podgate-cni"}], '
            '"others": [{"type": "podgate-cni"}], "plugins": [{"type": "x", "y": [{}]}], '
            '"args": {"plugins": [{"type": "podgate-cni"}]}, "plugin": [[{}]]}',
            '{"cniVersion": "1.0.0", "name": "n", "plugins": [{"type": "podgate-cni"}], '
            '"others": [{"type": "podgate-cni"}], '
            '"plugins": [{"type": "x", "y": [{}]},{"type": "podgate-cni"}], '
            '"args": {"plugins": [{"type": "podgate-cni"}]}, "plugin": [[{}]]}',
        ),
    ],
)
def test_plugin_is_the_last_of_the_list_that_runtimes_read(text: str, expected: str) -> None:
    assert not conflist.has_entry(text)
    assert conflist.with_entry(text, ENTRY) == expected
    assert conflist.has_entry(expected)
    assert conflist.with_entry(expected, ENTRY) == expected
    assert conflist.without_entry(expected) == text


def test_duplicate_entries_become_one() -> None:
    twice = CALICO.replace(
        '{\n      "type": "portmap"', '{"type":"podgate-cni"}, {"type":"portmap"'
    )
    twice = conflist.with_entry(twice, STRICT)
    types = [plugin["type"] for plugin in json.loads(twice)["plugins"]]
    assert types == ["calico", "portmap", "podgate-cni"]


@pytest.mark.parametrize("at", [0, 1, 2])
def test_plugin_is_removed_from_any_position(at: int) -> None:
    document = json.loads(CALICO)
    document["plugins"].insert(at, ENTRY)
    assert json.loads(conflist.without_entry(json.dumps(document, indent=1))) == json.loads(CALICO)


def test_plugin_is_removed_before_a_single_other_one() -> None:
    document = {"cniVersion": "1.0.0", "name": "pods", "plugins": [ENTRY, {"type": "ptp"}]}
    found = json.loads(conflist.without_entry(json.dumps(document)))
    assert found["plugins"] == [{"type": "ptp"}]


@pytest.mark.parametrize("count", [1, 2])
def test_list_of_nothing_else_becomes_empty(count: int) -> None:
    document = {"cniVersion": "1.0.0", "name": "pods", "plugins": [ENTRY] * count}
    assert json.loads(conflist.without_entry(json.dumps(document))) == {**document, "plugins": []}


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
plugins = st.builds(
    lambda kind, rest: {**rest, "type": kind},
    st.text().filter(lambda kind: kind != conflist.TYPE),
    st.dictionaries(st.text() | st.just("plugins"), json_values, max_size=3),
)
documents = st.builds(
    lambda rest, inner: {**rest, "cniVersion": "1.0.0", "name": "pods", "plugins": inner},
    st.dictionaries(st.text(), json_values, max_size=3).filter(lambda it: "cniVersions" not in it),
    st.lists(plugins, min_size=1, max_size=4),
)


@given(document=documents, indent=st.none() | st.integers(0, 3), ascii_only=st.booleans())
def test_adding_and_removing_keeps_every_byte(
    document: dict[str, Any], indent: int | None, ascii_only: bool
) -> None:
    text = json.dumps(document, indent=indent, ensure_ascii=ascii_only)
    entered = conflist.with_entry(text, STRICT)
    assert json.loads(entered) == {**document, "plugins": [*document["plugins"], STRICT]}
    assert conflist.without_entry(entered) == text


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "{",
            "[]",
            "{}",
            '{"plugins": [{"type": "x"}]}',
            '{"plugins": {}}',
            '{"plugins": ["x"]}',
            '{"plugins": [{}]}',
        ),
        *('{"plugins": [{"type": 1}]}', '{"cniVersion": 1, "plugins": [{"type": "x"}]}'),
    ],
)
def test_other_documents_are_rejected(text: str) -> None:
    for function in (conflist.without_entry, conflist.has_entry):
        with pytest.raises(ConflistError, match="it is not a CNI configuration"):
            function(text)
    with pytest.raises(ConflistError, match="it is not a CNI configuration"):
        conflist.with_entry(text, ENTRY)


@pytest.mark.parametrize("inner", ["", '{"type": "podgate-cni", "strictStart": true}'])
def test_list_without_other_plugins_is_rejected(inner: str) -> None:
    with pytest.raises(ConflistError, match="has no plugin that creates interfaces"):
        conflist.with_entry(f'{{"cniVersion": "1.0.0", "name": "n", "plugins": [{inner}]}}', ENTRY)


@pytest.mark.parametrize(
    ("versions", "newest"),
    [
        ({}, "0.1.0"),
        ({"cniVersion": "0.2.0"}, "0.2.0"),
        ({"cniVersion": "1.2.0"}, "1.2.0"),
        ({"cniVersion": "1.0.0", "cniVersions": ["0.4.0", "10.0.0"]}, "10.0.0"),
        ({"cniVersion": "x"}, "x"),
        ({"cniVersion": "1.1.0", "cniVersions": ["1.1.1", "1.1"]}, "1.1.1"),
        ({"cniVersion": "0.x.0", "cniVersions": ["0.1.0"]}, "0.1.0"),
    ],
)
def test_unsupported_version_is_rejected(versions: dict[str, object], newest: str) -> None:
    text = json.dumps({**versions, "name": "n", "plugins": [{"type": "x"}]})
    with pytest.raises(ConflistError) as caught:
        conflist.with_entry(text, ENTRY)
    assert str(caught.value) == (
        f"its cniVersion is {newest}, and podgate-cni supports 0.3.0, 0.3.1, 0.4.0, 1.0.0, 1.1.0; "
        "change it to one of these, or upgrade podgate"
    )
    assert not isinstance(caught.value, InvalidConflistError)


@pytest.mark.parametrize("versions", [["0.3.0"], ["1.1.0", "0.2.0"], ["0.9.0", "1.0.0"]])
def test_newest_version_decides(versions: list[str]) -> None:
    document = {"name": "n", "plugins": [{"type": "x"}], "cniVersions": versions}
    added = json.loads(conflist.with_entry(json.dumps(document), ENTRY))
    assert added == {**document, "plugins": [{"type": "x"}, ENTRY]}


def test_single_plugin_becomes_a_list() -> None:
    network = '{ "cniVersion": "0.4.0",\n "name": "n", "type": "bridge"}\n'
    text = conflist.from_network(network, ENTRY)
    assert text == (
        '{"cniVersion": "0.4.0", "name": "n", "plugins": '
        f'[{network.strip()}, {{"type": "podgate-cni"}}]}}\n'
    )
    assert json.loads(text) == {
        **{"cniVersion": "0.4.0", "name": "n"},
        "plugins": [json.loads(network), ENTRY],
    }
    for other in ('{"plugins": []}', '{"cniVersion": "0.2.0", "type": "bridge"}', '{"type": "x"}'):
        with pytest.raises(ConflistError):
            conflist.from_network(other, ENTRY)
    nameless = conflist.from_network('{"cniVersion": "0.4.0", "type": "bridge"}', ENTRY)
    assert json.loads(nameless)["name"] == ""
