"""Reading a pod at the edge."""

import copy
import ipaddress
from typing import Any

import msgspec
import pytest
import yaml

from agent import labels
from agent.pods.pod import SANDBOX_MISSING, Pod, PodError, Problem, read_pod
from probes.spec.fields import FieldProblem
from probes.spec.specs import PodSpec, parse_pod

MANIFEST: dict[str, Any] = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {
        "name": "web",
        "namespace": "shop",
        "uid": "b7c1",
        "labels": {labels.MODE_LABEL: "enforce"},
        "annotations": {labels.NETNS_ANNOTATION: "/run/netns/web"},
    },
    "spec": {"containers": [{"name": "app"}]},
}


def read(document: object) -> Pod:
    return read_pod(document, source="web.yaml")


def changed(path: str, value: object) -> dict[str, Any]:
    """The manifest with one field set, or removed for None."""
    document = copy.deepcopy(MANIFEST)
    target: Any = document
    *parents, last = path.split("/")
    for parent in parents:
        target = target[parent]
    if value is None:
        del target[last]
    else:
        target[last] = value
    return document


def test_a_whole_manifest_is_read() -> None:
    document = changed("status", {"podIPs": [{"ip": "198.18.1.1"}]})
    assert read(document) == Pod(
        uid="b7c1",
        namespace="shop",
        name="web",
        netns_path="/run/netns/web",
        labels={labels.MODE_LABEL: "enforce"},
        spec=parse_pod(document),
        source="web.yaml",
        manifest=document,
        reported_addresses=(ipaddress.ip_address("198.18.1.1"),),
    )
    assert read(changed("metadata/namespace", None)).namespace == "default"


def test_a_pod_without_a_uid_gets_the_same_one_every_time() -> None:
    first, second = read(changed("metadata/uid", None)), read(changed("metadata/uid", None))
    assert first.uid == second.uid != ""


def test_pods_of_different_namespaces_get_different_uids() -> None:
    one = changed("metadata/uid", None)
    other = copy.deepcopy(one)
    other["metadata"]["namespace"] = "other"
    assert read(one).uid != read(other).uid


def test_a_host_network_pod_needs_no_namespace_path() -> None:
    document = changed("metadata/annotations", None)
    document["spec"]["hostNetwork"] = True
    assert read(document).host_network


@pytest.mark.parametrize(
    ("document", "reason", "words"),
    [
        (None, "InvalidManifest", "not a pod manifest"),
        ([MANIFEST], "InvalidManifest", "not a pod manifest"),
        (changed("kind", "Service"), "InvalidManifest", "Service"),
        (changed("apiVersion", "v2"), "InvalidManifest", "v2"),
        (
            changed("metadata/name", None),
            "InvalidManifest",
            "web.yaml is not a pod manifest: object missing required field `name`",
        ),
        (changed("metadata/name", 7), "InvalidManifest", "str"),
        (changed("metadata/annotations", {}), "NetnsMissing", labels.NETNS_ANNOTATION),
    ],
)
def test_a_mistake_is_one_sentence(document: object, reason: str, words: str) -> None:
    with pytest.raises(PodError) as caught:
        read(document)
    problem = caught.value.problem
    assert problem.reason == reason
    assert words in problem.message
    assert problem.message.endswith(".")
    assert "\n" not in problem.message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("labels: {podgate.io/mode: off}", "podgate.io/mode is false, as YAML reads it"),
        ("annotations: {example.org/build: 42}", "example.org/build is 42, as YAML reads it"),
    ],
)
def test_value_without_quotation_marks_is_named(text: str, words: str) -> None:
    document = {**MANIFEST, "metadata": {"name": "web", **yaml.safe_load(text)}}
    with pytest.raises(PodError) as raised:
        read_pod(document, source="web.yaml")
    assert words in raised.value.problem.message
    assert "put the text into them" in raised.value.problem.message


def test_pod_is_named_with_its_namespace_and_a_file_by_its_name() -> None:
    assert read(MANIFEST).full_name == "shop/web"
    assert Pod(uid="u", namespace="", name="web.yaml").full_name == "web.yaml"


@pytest.mark.parametrize(
    ("problem", "is_missing"),
    [
        (None, False),
        (Problem(SANDBOX_MISSING, "It has none."), True),
        (Problem("InvalidManifest", "It is no pod."), False),
    ],
)
def test_pod_without_a_sandbox_is_one_of_which_the_runtime_lists_none(
    problem: Problem | None, *, is_missing: bool
) -> None:
    pod = Pod(uid="u", namespace="shop", name="web", manifest_problem=problem)
    assert pod.has_no_sandbox is is_missing


def test_problem_of_probes_has_the_first_reason_and_all_sentences() -> None:
    assert read(MANIFEST).probe_problem is None
    errors = tuple(FieldProblem(f"spec.{word}", word, f"It is {word}.") for word in ("One", "Two"))
    pod = msgspec.structs.replace(read(MANIFEST), spec=PodSpec(errors=errors))
    assert pod.probe_problem == Problem("One", "It is One. It is Two.")


def test_a_probe_with_a_mistake_leaves_the_pod_usable() -> None:
    probe = {"httpGet": {"port": "nowhere"}}
    pod = read(changed("spec/containers", [{"name": "app", "readinessProbe": probe}]))
    assert pod.probe_problem is not None
    assert pod.probe_problem.reason == "InvalidProbe"
    assert "nowhere" in pod.probe_problem.message


def with_relay(word: str) -> dict[str, Any]:
    annotations = MANIFEST["metadata"]["annotations"]
    return changed("metadata/annotations", {**annotations, labels.RELAY_ANNOTATION: word})


def test_relay_is_kept_off_by_an_annotation() -> None:
    assert read(MANIFEST).is_relayed
    assert not read(with_relay("off")).is_relayed


def test_unknown_relay_value_is_rejected() -> None:
    with pytest.raises(PodError, match="unknown value 'on'; use \"off\" or remove"):
        read(with_relay("on"))


def test_addresses_in_a_manifest_s_status_are_the_pod_s() -> None:
    document = changed("status", {"phase": "Running", "podIPs": [{"ip": "198.18.1.1"}]})
    assert read(document).reported_addresses == (ipaddress.ip_address("198.18.1.1"),)


def test_a_manifest_s_status_without_addresses_reports_none() -> None:
    assert read(changed("status", {"phase": "Pending"})).reported_addresses == ()


def test_an_address_in_a_manifest_s_status_that_is_none_is_one_sentence() -> None:
    with pytest.raises(PodError, match=r"status\.podIPs: 'web'") as raised:
        read(changed("status", {"podIPs": [{"ip": "web"}]}))
    assert raised.value.problem.reason == "InvalidManifest"
