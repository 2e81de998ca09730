"""v1.Pods in protobuf, compared with those that Kubernetes' own marshaller makes.

recorded/whole-pod.json has a pod, and the bytes of v1.Pod#Marshal() of Kubernetes 1.36.2 for it.
"""

import base64
import json
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest

from agent.api.podinfo import pod_encoding, pod_fields

RECORDED = json.loads(
    (pathlib.Path(__file__).parent / "recorded" / "whole-pod.json").read_text(encoding="utf-8")
)


def fields(content: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Numbers and values of a message's fields."""
    position = 0

    def varint() -> int:
        nonlocal position
        value = shift = 0
        while True:
            byte = content[position]
            position += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while position < len(content):
        key = varint()
        number = varint()
        if key & 7 == 0:
            yield key >> 3, number
        else:
            yield key >> 3, content[position : position + number]
            position += number


def kinds_of(message: str) -> dict[int, str]:
    """Types of a message's fields by number, as in the table."""
    found, is_inside = {}, False
    for line in pod_fields.SCHEMA.strip().splitlines():
        name, *words = line.split()
        if line.startswith(" "):
            words = [name, *words]
        else:
            is_inside = name == message
        if is_inside:
            for word in words:
                number, _, kind = word.partition("=")[2].partition(":")
                found[int(number)] = kind
    return found


def tree(kind: str, content: bytes) -> list[Any]:
    """A message without zeros, which Go writes and JSON omits, in an order of its own."""
    found: list[Any] = []
    kinds = {"Time": {}, "Quantity": {}, "IntOrString": {}}.get(kind) or kinds_of(kind)
    for number, value in fields(content):
        inner = kinds.get(number, "")
        if inner.startswith("{"):
            entry = dict(fields(value))  # type: ignore[arg-type]
            value = (entry[1], subtree(inner.strip("{}"), entry.get(2, b"")))  # type: ignore[assignment]
        else:
            value = subtree(inner.strip("*+"), value)
        if value not in (0, b"", []) or inner.startswith("*"):
            found.append((number, value))
    return sorted(found, key=repr)


def subtree(kind: str, value: int | bytes) -> Any:
    is_message = kind[:1].isupper()
    return tree(kind, value) if is_message and isinstance(value, bytes) else value


def test_whole_pod_equals_what_kubernetes_marshals() -> None:
    expected = tree("Pod", base64.b64decode(RECORDED["protobuf"]))
    assert tree("Pod", pod_encoding.encode("Pod", RECORDED["pod"])) == expected
    assert "PodSpec" in pod_fields.SCHEMA
    assert len(expected) == 3


def test_empty_and_zero_pointers_are_kept() -> None:
    """Go has pointers there: an absent field means something else."""
    spec = {"terminationGracePeriodSeconds": 0, "volumes": [{"name": "cache", "emptyDir": {}}]}
    content = dict(fields(pod_encoding.encode("PodSpec", spec)))
    assert content[4] == 0
    (_, source) = dict(fields(content[1]))[1], dict(fields(content[1]))[2]  # type: ignore[arg-type]
    assert dict(fields(source)) == {2: b""}  # type: ignore[arg-type]


def test_values_of_another_type_and_unknown_fields_are_left_out() -> None:
    pod = {
        "metadata": {"name": "web", "labels": ["a"], "generation": "3", "later": {"a": 1}},
        "spec": {"containers": [{"name": 5, "image": "x"}, "text"], "nodeName": None},
        "status": "Running",
    }
    encoded = pod_encoding.encode("Pod", pod)
    assert encoded == pod_encoding.encode(
        "Pod", {"metadata": {"name": "web"}, "spec": {"containers": [{"image": "x"}]}}
    )


@pytest.mark.parametrize("quantity", ["2", 2])
def test_quantity_is_text_or_an_integer(quantity: str | int) -> None:
    content = pod_encoding.encode("Container", {"resources": {"limits": {"cpu": quantity}}})
    ((_, resources),) = fields(content)
    ((_, entry),) = fields(resources)  # type: ignore[arg-type]
    name, value = fields(entry)  # type: ignore[arg-type]
    assert (name[1], value[1]) == (b"cpu", b"\x0a\x012")


def test_unpaired_surrogates_do_not_fail() -> None:
    assert b"a?" in pod_encoding.encode("Pod", {"metadata": {"name": "a\ud800"}})
