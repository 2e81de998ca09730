"""Which HostAccessPolicy a gate's rule is from: by its counter's key, a hash of its content."""

import pathlib
from collections.abc import Iterable
from typing import Any

import msgspec

from agent.pods.object_labels import LabelSnapshot
from agent.policy import api_types
from agent.policy.api_types import HostAccessPolicy, Policy
from agent.policy.kinds import PolicyError
from agent.policy.matching import RuleSet


class _SavedFiles(msgspec.Struct):
    """`policies.json`, of --rules."""

    files: dict[str, list[HostAccessPolicy]] = {}


class _SavedApi(msgspec.Struct):
    """`apipolicies.json`, of the API server."""

    newest: list[dict[str, Any]] = []
    good: list[HostAccessPolicy] = []


class Policies:
    """The policies, and their names by the key of a rule: empty for rules of others."""

    def __init__(
        self, documents: Iterable[HostAccessPolicy], labels: LabelSnapshot | None = None
    ) -> None:
        """labels: of the node, which some policies select."""
        policies: dict[str, Policy] = {}
        for document in documents:
            try:
                policies.setdefault(document.metadata.name, api_types.check(document, source=""))
            except PolicyError:
                continue
        self.policies = tuple(policies.values())
        """Those that are valid, of all nodes."""
        ids = RuleSet.of(policies.values(), labels).ids
        self._names = {number: name for (name, _), number in ids.items()}

    def name_of(self, rule_id: int) -> str:
        return self._names.get(rule_id, "")


def decode(documents: Iterable[object]) -> list[HostAccessPolicy]:
    """Without those that are invalid for this version."""
    found = []
    for document in documents:
        try:
            found.append(msgspec.convert(document, HostAccessPolicy))
        except (PolicyError, ValueError):
            continue
    return found


def read_saved(run_directory: pathlib.Path) -> list[HostAccessPolicy]:
    """What the agent has saved of its policies. Blocks."""
    state = run_directory / "state"
    of_files = _decoded(state / "policies.json", _SavedFiles)
    of_api = _decoded(state / "apipolicies.json", _SavedApi)
    found = [policy for kept in of_files.files.values() for policy in kept]
    return [*found, *decode(of_api.newest), *of_api.good]


def _decoded(path: pathlib.Path, kind: type) -> Any:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError):
        return kind()
