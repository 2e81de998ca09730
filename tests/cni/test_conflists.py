"""One plugin more, and one less, in texts that are others'."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.cni import conflist
from agent.cni.conflist import ConflistError

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
    ],
)
def test_unsupported_version_is_rejected(versions: dict[str, object], newest: str) -> None:
    text = json.dumps({**versions, "name": "n", "plugins": [{"type": "x"}]})
    with pytest.raises(
        ConflistError, match=f"its cniVersion is {newest}, and podgate-cni supports"
    ):
        conflist.with_entry(text, ENTRY)


def test_single_plugin_becomes_a_list() -> None:
    network = '{ "cniVersion": "0.4.0",\n "name": "n", "type": "bridge"}\n'
    text = conflist.from_network(network, ENTRY)
    assert network.strip() in text
    assert json.loads(text) == {
        **{"cniVersion": "0.4.0", "name": "n"},
        "plugins": [json.loads(network), ENTRY],
    }
    with pytest.raises(ConflistError):
        conflist.from_network('{"plugins": []}', ENTRY)
