"""The plugin's output for a runtime, without any work for the kernel."""

import json
import pathlib
from collections.abc import Mapping
from typing import Any

import pytest

from agent.cni import state as cni_state
from agent.pods.pod_modes import NewPodModes
from bpf import abi
from bpf.gates import Attachment
from bpf.verdicts import Mode
from tests.cni import calling
from tests.cni.calling import POD, call

VERSIONS = ["0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"]
RESULT = {
    "cniVersion": "1.0.0",
    "interfaces": [{"name": "veth0"}, {"name": "eth0", "sandbox": "/nowhere"}],
    "ips": [{"address": "198.18.10.2/24", "interface": 1}],
}


@pytest.fixture
def conf(tmp_path: pathlib.Path) -> dict[str, Any]:
    """A configuration that leads to nothing of this machine."""
    return {
        "cniVersion": "1.0.0",
        "name": "pods",
        "type": "podgate-cni",
        "bpffs": str(tmp_path / "bpf"),
        "runDirectory": str(tmp_path),
        "prevResult": RESULT,
    }


def publish(directory: pathlib.Path, **changes: object) -> None:
    state = {"mode": "enforce", "attachment": "tcx", "schema": abi.SCHEMA, "programs": "ab12"}
    (directory / "cni.json").write_text(json.dumps(state | changes))


@pytest.mark.parametrize("version", VERSIONS)
def test_version_names_what_is_spoken(plugin: pathlib.Path, version: str) -> None:
    answer = call(plugin, "VERSION", {"cniVersion": version})
    assert answer.status == 0
    assert answer.result == {"cniVersion": version, "supportedVersions": VERSIONS}


def test_version_needs_no_input(plugin: pathlib.Path) -> None:
    assert call(plugin, "VERSION", b"").result["supportedVersions"] == VERSIONS


@pytest.mark.parametrize("version", VERSIONS)
def test_the_result_before_is_passed_on_to_the_byte(
    plugin: pathlib.Path, conf: dict[str, Any], version: str
) -> None:
    previous = '{ "cniVersion":"VERSION",\t"ips":[ ],"x":"\\u00e9é", "n": 1e3}'
    previous = previous.replace("VERSION", version)
    rest = {**conf, "cniVersion": version}
    del rest["prevResult"]
    text = json.dumps(rest)[:-1] + f', "prevResult": {previous} }}'
    answer = call(plugin, "ADD", text.encode(), POD)
    assert answer.status == 0
    assert answer.output == previous.encode() + b"\n"


@pytest.mark.parametrize(
    "value",
    [
        # Each is rejected by a JSON library that was tried in place of json.c.
        *("1e999", "-1e999", "1" + "0" * 400, "12345678901234567890123"),
        *('"\\ud800"', '"\\udc00"', '"\\u0000"'),
    ],
)
def test_values_that_no_c_type_holds_are_passed_on(
    plugin: pathlib.Path, conf: dict[str, Any], value: str
) -> None:
    previous = f'{{"cniVersion": "1.0.0", "x": {value}}}'
    text = json.dumps({**conf, "prevResult": "X"}).replace('"X"', previous)
    answer = call(plugin, "ADD", text.encode(), POD)
    assert answer.status == 0
    assert answer.output == previous.encode() + b"\n"


@pytest.mark.parametrize("previous", [{}, {"ips": []}])
def test_a_result_without_a_version_gets_one(
    plugin: pathlib.Path, conf: dict[str, Any], previous: dict[str, Any]
) -> None:
    answer = call(plugin, "ADD", {**conf, "prevResult": previous}, POD)
    assert answer.result == {"cniVersion": "1.0.0", **previous}


def test_pod_starts_without_an_agent_and_stderr_has_the_reason(
    plugin: pathlib.Path, conf: dict[str, Any]
) -> None:
    answer = call(plugin, "ADD", conf, POD)
    assert answer.status == 0
    assert answer.result == RESULT
    assert "pod starts without a gate: the agent has not run since" in answer.stderr


def test_with_strict_start_it_does_not(plugin: pathlib.Path, conf: dict[str, Any]) -> None:
    answer = call(plugin, "ADD", {**conf, "strictStart": True}, POD)
    assert answer.error["code"] == 11
    assert answer.error["msg"] == "the pod cannot be gated yet; try again"
    assert "the agent has not run since the node booted" in answer.error["details"]


def test_mode_off_is_left_alone_even_with_strict_start(
    plugin: pathlib.Path, conf: dict[str, Any], tmp_path: pathlib.Path
) -> None:
    publish(tmp_path, mode="off")
    answer = call(plugin, "ADD", {**conf, "strictStart": True}, POD)
    assert (answer.status, answer.stderr) == (0, "")


LONGEST = "n" * 63


@pytest.mark.parametrize(
    ("arguments", "mode"),
    [
        ("K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web", "off"),
        ("IgnoreUnknown=1;K8S_POD_NAME=web;K8S_POD_NAMESPACE=shop", "off"),
        ("K8S_POD_NAME=web;K8S_POD_NAMESPACE=vault", "enforce"),
        (f"K8S_POD_NAME=web;K8S_POD_NAMESPACE={LONGEST}", "off"),
        # None, or none that a namespace can have: as all others.
        ("K8S_POD_NAME=web", "enforce"),
        ("K8S_POD_NAME=web;K8S_POD_NAMESPACE=", "enforce"),
        ("K8S_POD_NAME=web;K8S_POD_NAMESPACE=sho", "enforce"),
        ("K8S_POD_NAME=web;K8S_POD_NAMESPACE=shops", "enforce"),
        ("K8S_POD_NAME=web;XK8S_POD_NAMESPACE=shop", "enforce"),
        ("K8S_POD_NAME=K8S_POD_NAMESPACE=shop", "enforce"),
        (f"K8S_POD_NAME=web;K8S_POD_NAMESPACE={LONGEST}x", "enforce"),
        (f"K8S_POD_NAME=web;K8S_POD_NAMESPACE={'x' * 100_000}", "enforce"),
    ],
)
def test_namespaces_mode_counts_before_the_nodes(
    plugin: pathlib.Path, conf: dict[str, Any], tmp_path: pathlib.Path, arguments: str, mode: str
) -> None:
    publish(tmp_path, namespaces={"shop": "off", LONGEST: "off"})
    answer = call(plugin, "ADD", {**conf, "strictStart": True}, {**POD, "CNI_ARGS": arguments})
    # Without pins a pod that is to be gated has to wait.
    assert (answer.status == 0) == (mode == "off")


@pytest.mark.parametrize("mark", ["run", "bpffs"])
def test_pod_waits_for_no_gate_while_the_node_is_switched_off(
    plugin: pathlib.Path, conf: dict[str, Any], tmp_path: pathlib.Path, mark: str
) -> None:
    """Also with a previous state file, which could not be written any more."""
    publish(tmp_path)
    whole = {**conf, "strictStart": True, "bpffs": str(tmp_path / "bpf")}
    assert call(plugin, "ADD", whole, POD).status == 1
    path = tmp_path / "off" if mark == "run" else tmp_path / "bpf" / "podgate" / "off"
    path.mkdir(parents=True)
    assert call(plugin, "ADD", whole, POD).status == 0
    assert call(plugin, "STATUS", whole).status == 0


def test_state_of_ten_thousand_namespaces_is_read(
    plugin: pathlib.Path, conf: dict[str, Any], tmp_path: pathlib.Path
) -> None:
    names = [f"{number:063d}" for number in range(cni_state.MAX_NAMESPACES + 1)]
    modes = dict.fromkeys(names, Mode.ENFORCE) | {"demo": Mode.STRICT, "last": Mode.AUDIT}
    cni_state.publish(tmp_path, NewPodModes(Mode.OFF, modes), Attachment.TCX)
    assert (tmp_path / "cni.json").stat().st_size < 1 << 20
    answer = call(plugin, "ADD", {**conf, "strictStart": True}, POD)
    # It is among the strictest, which the file has in any case.
    assert "gates" in answer.error["details"]


@pytest.mark.parametrize("arguments", [None, "", "IgnoreUnknown=1", "XK8S_POD_NAME=web"])
def test_a_container_that_is_no_pod_is_left_alone(
    plugin: pathlib.Path, conf: dict[str, Any], arguments: str | None
) -> None:
    variables = {name: value for name, value in POD.items() if name != "CNI_ARGS"}
    if arguments is not None:
        variables["CNI_ARGS"] = arguments
    answer = call(plugin, "ADD", {**conf, "strictStart": True}, variables)
    assert (answer.status, answer.stderr) == (0, "")
    assert answer.result == RESULT


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"schema": abi.SCHEMA + 1},
            "podgate-cni and the agent have different versions; run the agent's",
        ),
        ({"schema": "2"}, "different versions"),
        ({"programs": "../x"}, "is not written by podgate"),
        ({"programs": "a" * 33}, "is not written by podgate"),
        ({"mode": "open"}, "unknown mode open"),
        ({"mode": None}, "is not written by podgate"),
        ({"namespaces": {"demo": "open"}}, "unknown mode open"),
        ({"namespaces": {"demo": 2}}, "is not written by podgate"),
        ({"namespaces": ["demo"]}, "is not written by podgate"),
        ({}, "cannot be opened"),
    ],
)
def test_invalid_settings_of_the_agent_are_an_error(
    plugin: pathlib.Path,
    conf: dict[str, Any],
    tmp_path: pathlib.Path,
    changes: dict[str, object],
    words: str,
) -> None:
    publish(tmp_path, **changes)
    answer = call(plugin, "ADD", {**conf, "strictStart": True}, POD)
    assert words in answer.error["details"]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b" " * ((1 << 20) + 1)])
def test_broken_file_of_the_agent_is_reported(
    plugin: pathlib.Path, conf: dict[str, Any], tmp_path: pathlib.Path, content: bytes
) -> None:
    (tmp_path / "cni.json").write_bytes(content)
    answer = call(plugin, "ADD", {**conf, "strictStart": True}, POD)
    assert "is not written by podgate" in answer.error["details"]


def without(mapping: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in mapping.items() if key != name}


@pytest.mark.parametrize("name", ["CNI_CONTAINERID", "CNI_IFNAME", "CNI_NETNS"])
@pytest.mark.parametrize("command", ["ADD", "CHECK"])
def test_a_missing_variable_is_named(
    plugin: pathlib.Path, conf: dict[str, Any], command: str, name: str
) -> None:
    answer = call(plugin, command, conf, without(POD, name))
    assert answer.error["code"] == 4
    assert answer.error["details"] == name


@pytest.mark.parametrize("previous", [None, [], "x", 1])
@pytest.mark.parametrize("command", ["ADD", "CHECK"])
def test_it_must_come_after_others(
    plugin: pathlib.Path, conf: dict[str, Any], command: str, previous: object
) -> None:
    assert call(plugin, command, {**conf, "prevResult": previous}, POD).error["code"] == 7
    assert call(plugin, command, without(conf, "prevResult"), POD).error["code"] == 7


@pytest.mark.parametrize(
    "text",
    [
        *(b"", b"{", b'{"a":1,}', b'{"a" 1}', b"[1 2]", b'"\\x"', b"nul", b"01", b"1.", b"--1"),
        *(b"\xff", b'{"a":"\n"}', b'"\\u12"', b'"\xed\xa0\x80"', b"{}{}", b"[" * 65 + b"]" * 65),
        *(b"[]", b"1"),
        # Each is accepted by a JSON library that was tried in place of json.c.
        *(b'{"a":NaN}', b'{"a":Infinity}', b'{"a":1.}', b'{"a":1.e1}', b"{}\0", b'{"a":\f1}'),
        *(b'{"a":"\xc0\x80"}', b'{"a":"\xed\xa0\x80"}', b'{"a":"\xf4\x90\x80\x80"}'),
        b'{"a":' + b"[" * 64 + b"]" * 64 + b"}",
    ],
)
@pytest.mark.parametrize("command", ["ADD", "CHECK", "GC", "STATUS"])
def test_configuration_that_is_no_json_object_is_an_error(
    plugin: pathlib.Path, command: str, text: bytes
) -> None:
    assert call(plugin, command, text, POD).error["code"] == 6


@pytest.mark.parametrize("version", [None, "0.1.0", "0.2.0", "1.2.0", "2.0.0", "", 1])
def test_unknown_version_is_an_error(
    plugin: pathlib.Path, conf: dict[str, Any], version: object
) -> None:
    assert call(plugin, "ADD", {**conf, "cniVersion": version}, POD).error["code"] == 1
    assert call(plugin, "ADD", without(conf, "cniVersion"), POD).error["code"] == 1


def test_endless_configuration_is_an_error(plugin: pathlib.Path) -> None:
    assert call(plugin, "ADD", b" " * ((1 << 20) + 1), POD).error["code"] == 5


@pytest.mark.parametrize("command", ["", "add", "REMOVE"])
def test_unknown_command_is_an_error(plugin: pathlib.Path, command: str) -> None:
    assert call(plugin, command, b"{}", POD).error["code"] == 4


@pytest.mark.parametrize("field", ["bpffs", "runDirectory"])
def test_a_path_must_be_one(plugin: pathlib.Path, conf: dict[str, Any], field: str) -> None:
    for value in (1, "relative", "/" + "x" * 5000):
        error = call(plugin, "ADD", {**conf, field: value}, POD).error
        assert (error["code"], error["details"]) == (7, field)


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[]", b"{}", b'{"cniVersion": "9.9.9"}', b"\xff" * 99]
)
def test_del_never_fails(plugin: pathlib.Path, text: bytes) -> None:
    for variables in (POD, {}):
        answer = call(plugin, "DEL", text, variables)
        assert (answer.status, answer.output) == (0, b"")


def test_del_without_anything_to_remove_succeeds(
    plugin: pathlib.Path, conf: dict[str, Any]
) -> None:
    for configuration in (conf, without(conf, "prevResult")):
        answer = call(plugin, "DEL", configuration, POD)
        assert (answer.status, answer.output, answer.stderr) == (0, b"", "")


def test_gc_without_pins_succeeds(plugin: pathlib.Path, conf: dict[str, Any]) -> None:
    answer = call(plugin, "GC", {**conf, "cni.dev/valid-attachments": []})
    assert (answer.status, answer.output) == (0, b"")


def test_status_reports_whether_pods_have_to_wait(
    plugin: pathlib.Path, conf: dict[str, Any]
) -> None:
    del conf["prevResult"]
    assert call(plugin, "STATUS", conf).status == 0
    assert call(plugin, "STATUS", {**conf, "strictStart": True}).error["code"] == 50


def test_the_schema_is_that_of_the_programs(plugin: pathlib.Path) -> None:
    assert f"podgate/v{abi.SCHEMA}/maps/".encode() in plugin.read_bytes()
    assert calling.SOURCES.is_dir()


def test_run_by_hand_it_explains_itself(plugin: pathlib.Path) -> None:
    answer = call(plugin, "", b"")
    assert answer.status == 1
