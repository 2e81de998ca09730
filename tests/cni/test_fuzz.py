"""Bytes of other plugins: what the plugin takes for JSON, and that nothing makes it stumble."""

import json
import pathlib
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bpf import abi
from tests.cni import calling
from tests.cni.calling import POD, call

# A level of the configuration and one of the result are around each value.
_DEEPEST = 60

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    # A lone surrogate is no character, and no UTF-8.
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)
objects = st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), values)
often = settings(
    max_examples=75, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The plugin with the compiler's checks of memory and of undefined behaviour."""
    return calling.build(
        tmp_path_factory.mktemp("checked") / "podgate-cni",
        *("-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
        "-fno-omit-frame-pointer",
    )


def conf(previous: object) -> dict[str, Any]:
    """As runtimes have it, and leading to nothing of this machine."""
    return {
        **{"cniVersion": "1.0.0", "name": "pods", "bpffs": "/nowhere", "runDirectory": "/nowhere"},
        "prevResult": previous,
    }


def end_well(plugin: pathlib.Path, text: bytes) -> calling.Answer:
    """A call that ends as the protocol has it, whatever the bytes."""
    answer = call(plugin, "ADD", text, POD)
    assert "Sanitizer" not in answer.stderr, answer.stderr
    assert "runtime error" not in answer.stderr, answer.stderr
    if answer.status:
        assert answer.error["code"] in range(1, 8)
    else:
        assert isinstance(answer.result, dict)
    return answer


@often
@given(previous=objects, is_ascii=st.booleans())
def test_any_result_comes_through(
    checked: pathlib.Path, previous: dict[str, Any], is_ascii: bool
) -> None:
    text = json.dumps(conf(previous), ensure_ascii=is_ascii).encode()
    assert end_well(checked, text).result == {"cniVersion": "1.0.0", **previous}


@often
@given(previous=objects, data=st.data())
def test_damaged_bytes_do_no_harm(
    checked: pathlib.Path, previous: dict[str, Any], data: st.DataObject
) -> None:
    text = bytearray(json.dumps(conf(previous)).encode())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(text) - 1))
        text[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=3))
    answer = end_well(checked, bytes(text))
    assert is_read(answer) == is_json(bytes(text))


@often
@given(text=st.binary(max_size=200))
def test_any_bytes_do_no_harm(checked: pathlib.Path, text: bytes) -> None:
    end_well(checked, text)


@often
@given(text=st.text(st.sampled_from('{}[]:,"\\u0dDcC8 1-.eEtruefalsn\t'), max_size=60))
def test_what_looks_like_json_is_read_as_others_read_it(checked: pathlib.Path, text: str) -> None:
    before, after = '{"cniVersion": "1.0.0", "bpffs": "/nowhere", "prevResult": {"x": ', "}}"
    whole = (before + text + after).encode()
    assert is_read(end_well(checked, whole)) == is_json(whole)


states = st.fixed_dictionaries(
    {},
    optional={
        "schema": st.sampled_from([abi.SCHEMA, abi.SCHEMA + 1, "2"]),
        "programs": st.sampled_from(["ab12", "../x", 1]),
        "attachment": st.sampled_from(["tcx", "clsact", None]),
        "mode": st.sampled_from(["off", "audit", "enforce", "strict", "open", 3]),
        "namespaces": st.dictionaries(
            st.sampled_from(["demo", "shop", "d\u0065mo"]) | st.text(max_size=80),
            st.sampled_from(["off", "audit", "enforce", "strict", "open", 2, None, {}]),
        )
        | values,
    },
)


@often
@given(state=states, data=st.data())
def test_any_state_of_the_agent_does_no_harm(
    checked: pathlib.Path, tmp_path: pathlib.Path, state: dict[str, Any], data: st.DataObject
) -> None:
    text = bytearray(json.dumps(state).encode())
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.integers(0, len(text)))
        text[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=3))
    (tmp_path / "cni.json").write_bytes(text)
    answer = end_well(checked, json.dumps(conf({}) | {"runDirectory": str(tmp_path)}).encode())
    assert answer.status == 0
    # Without pins a pod stays without a gate silently only where that is desired.
    assert answer.stderr or is_off(bytes(text))


def is_off(text: bytes) -> bool:
    """Whether Python reads that the namespace "demo" is in off, too."""
    state = json.loads(text.decode(), parse_constant=_reject)
    return bool(state.get("namespaces", {}).get("demo", state.get("mode")) == "off")


@pytest.mark.parametrize("namespaces", [{"demo": "off"}, {"shop": "off"}, {}])
@pytest.mark.parametrize("mode", ["off", "audit", "enforce", "strict"])
def test_a_valid_state_is_read(
    checked: pathlib.Path, tmp_path: pathlib.Path, namespaces: dict[str, str], mode: str
) -> None:
    state = {"schema": abi.SCHEMA, "programs": "ab12", "attachment": "tcx", "mode": mode}
    text = json.dumps(state | {"namespaces": namespaces}).encode()
    (tmp_path / "cni.json").write_bytes(text)
    answer = end_well(checked, json.dumps(conf({}) | {"runDirectory": str(tmp_path)}).encode())
    assert (not answer.stderr) == is_off(text)


def is_read(answer: calling.Answer) -> bool:
    return answer.status == 0 or answer.error["msg"] not in (
        "the configuration is not JSON",
        "the configuration is not a JSON object",
    )


def is_json(text: bytes) -> bool:
    """Whether Python reads an object, too, without what it takes beyond RFC 8259."""
    try:
        return isinstance(json.loads(text.decode(), parse_constant=_reject), dict)
    except ValueError:
        return False


def _reject(name: str) -> object:
    raise ValueError(name)


@pytest.mark.parametrize("deep", [_DEEPEST, _DEEPEST + 10, 100_000])
def test_depth_is_bounded(checked: pathlib.Path, deep: int) -> None:
    text = json.dumps(conf("X")).replace('"X"', '{"x":' + "[" * deep + "]" * deep + "}").encode()
    answer = end_well(checked, text)
    assert (answer.status == 0) == (deep == _DEEPEST)


@pytest.mark.parametrize(
    "name", ["prevResult", "prev\\u0052esult", "\\u0070revResult", "cniVersion\\u0000", "x" * 500]
)
def test_names_are_compared_as_they_read(checked: pathlib.Path, name: str) -> None:
    text = '{"cniVersion": "1.0.0", "bpffs": "/nowhere", "NAME": {}}'.replace("NAME", name)
    answer = end_well(checked, text.encode())
    assert (answer.status == 0) == (json.loads(f'"{name}"') == "prevResult")


def test_of_several_members_of_a_name_the_last_counts(checked: pathlib.Path) -> None:
    text = b'{"cniVersion": "9", "cniVersion": "1.0.0", "prevResult": 1, "prevResult": {}}'
    assert end_well(checked, text).status == 0
