"""The CustomResourceDefinition of HostAccessPolicies, made from the structs of api_types.py.

An API server prunes fields that it does not know, and a policy without the field that somebody
misspelt lets in more than was meant. So they are kept (x-kubernetes-preserve-unknown-fields), and
refused by counting: an object may have as many fields as it has of those that are known. That is
all that structural schemas allow; they take no `additionalProperties: false`.
"""

import itertools
from typing import Any, Final

import msgspec
import yaml

from agent import labels
from agent.policy import api_types
from agent.policy.api_types import SpecField

Json = dict[str, Any]

_PLACES: Final = "#/components/"
# What a rule costs is estimated by how often it can be asked. A gate holds 32 rules, and ports that
# follow each other are one.
_MOST_ITEMS: Final = 256

_DESCRIPTIONS: Final = {
    "SpecField": {
        "pods": "The pods that are let in to; all that is said must hold, and {} is every pod.",
        "from": "Who of the node is let in: any of these.",
        "ports": "What they are let in to: any of these; left out, everything.",
    },
    "PodSelector": {
        "namespaces": "The pods' namespaces; left out, all.",
        "podSelector": "The pods' labels; left out, all pods.",
    },
    "LabelSelector": {
        "matchLabels": "Labels that the pod must have, with these values.",
        "matchExpressions": "What else must hold of the pod's labels.",
    },
    "Requirement": {
        "key": "The label.",
        "operator": "In and NotIn need values, Exists and DoesNotExist take none.",
        "values": "NotIn and DoesNotExist hold where the label is missing.",
    },
    "FromField": {
        "anyProcess": "Whatever the node sends, its kernel included.",
        "kernel": "Packets of the node's kernel behind which no socket stands.",
        "cgroup": "Sockets that were made in a cgroup.",
    },
    "Nothing": {},
    "CgroupField": {
        "path": "As in /proc/PID/cgroup, for instance /system.slice/name.service.",
        "match": "subtree: and whatever is below it.",
    },
    "PortField": {
        "protocol": "TCP, UDP, SCTP, ICMP (both families), or an IP protocol number.",
        "port": "The pod's port, or the first one of a range; left out, all.",
        "endPort": "The last one of a range.",
    },
}

# What `policies.check` says in sentences of its own.
_LIMITS: Final[dict[tuple[str, str], Json]] = {
    ("CgroupField", "path"): {"pattern": "^/"},
    ("PortField", "protocol"): {
        "minimum": 1,
        "maximum": 255,
        "pattern": f"^({'|'.join(api_types.PROTOCOLS)})$",
    },
}
_NUMBERED: Final = ", ".join(map(str, sorted(api_types.WITH_PORTS)))
# What no other keyword can say: rules in CEL, each with its sentence.
_RULES: Final = {
    "Requirement": {
        "self.operator in ['In', 'NotIn'] ? has(self.values) && size(self.values) > 0 : "
        "!has(self.values) || size(self.values) == 0": "In and NotIn need values, Exists and "
        "DoesNotExist take none"
    },
    "PortField": {
        "!has(self.endPort) || (has(self.port) && self.endPort >= self.port)": "endPort needs a "
        "port that is not after it",
        "!has(self.port) || !has(self.protocol) || (type(self.protocol) == int ? self.protocol in "
        f"[{_NUMBERED}] : self.protocol != 'ICMP')": "this protocol has no ports; leave port out",
    },
}

_COLUMNS: Final = (
    ("Namespaces", "string", ".spec.pods.namespaces", 0),
    ("From", "string", ".spec.from", 1),
    ("Ports", "string", ".spec.ports", 1),
    ("Age", "date", ".metadata.creationTimestamp", 0),
)


def manifest() -> str:
    """The content of deploy/manifests/crd.yaml."""
    head = (
        "# `make docs` makes this from agent/policy/api_types.py; "
        "docs/rules.md says what it means.\n"
    )
    return head + yaml.safe_dump(definition(), sort_keys=False, width=100)


def definition() -> Json:
    """The object, as it is applied."""
    plural, group = labels.POLICY_PLURAL, labels.POLICY_GROUP
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{plural}.{group}",
            "labels": {"app.kubernetes.io/name": "podgate"},
        },
        "spec": {
            "group": group,
            "scope": "Cluster",
            "names": {
                "kind": labels.POLICY_KIND,
                "listKind": f"{labels.POLICY_KIND}List",
                "plural": plural,
                "singular": labels.POLICY_KIND.lower(),
                "shortNames": ["hap"],
                "categories": ["podgate"],
            },
            "versions": [
                {
                    "name": labels.POLICY_VERSION,
                    "served": True,
                    "storage": True,
                    "additionalPrinterColumns": [
                        {"name": name, "type": kind, "jsonPath": path, "priority": priority}
                        for name, kind, path, priority in _COLUMNS
                    ],
                    "schema": {"openAPIV3Schema": schema()},
                }
            ],
        },
    }


def schema() -> Json:
    """The structural schema of one object."""
    _, parts = msgspec.json.schema_components((SpecField,), ref_template=_PLACES + "{name}")
    return {
        "description": "Who of a node may start flows to which of its pods.",
        "type": "object",
        "required": ["spec"],
        "properties": {"spec": _object("SpecField", parts)},
    }


def _object(name: str, parts: dict[str, Json]) -> Json:
    """One struct."""
    given, required = parts[name]["properties"], parts[name]["required"]
    made: Json = {"type": "object"}
    if name == "LabelSelector":
        # As everywhere in the API: two appliers do not mix theirs.
        made["x-kubernetes-map-type"] = "atomic"
    made["x-kubernetes-preserve-unknown-fields"] = True
    if name == "FromField":
        made |= {"minProperties": 1, "maxProperties": 1}
        made["oneOf"] = [{"required": [field]} for field in given]
    else:
        made |= _counted(required, sorted(given.keys() - set(required)))
    if rules := _RULES.get(name):
        made["x-kubernetes-validations"] = [
            {"rule": rule, "message": message} for rule, message in rules.items()
        ]
    if given:
        made["properties"] = {
            field: {
                "description": _DESCRIPTIONS[name][field],
                **_field(one, parts),
                **_LIMITS.get((name, field), {}),
            }
            for field, one in given.items()
        }
    return made


def _counted(required: list[str], optional: list[str]) -> Json:
    """No field but these. Of the combinations that are there, the largest leaves no room."""
    combinations = [
        combination
        for size in range(len(optional), 0, -1)
        for combination in itertools.combinations(optional, size)
    ]
    made: Json = {"required": required} if required else {}
    if not combinations:
        return made | {"maxProperties": len(required)}
    counted: list[Json] = [
        {"required": list(one), "maxProperties": len(required) + len(one)} for one in combinations
    ]
    return made | {"anyOf": [*counted, {"maxProperties": len(required)}]}


def _field(given: Json, parts: dict[str, Json]) -> Json:
    """One field's schema, from what msgspec says of its type."""
    kinds = [one for one in given.get("anyOf", [given]) if one != {"type": "null"}]
    made = _typed(kinds[0], parts) if len(kinds) == 1 else {"x-kubernetes-int-or-string": True}
    # Empty ones, and null, are what is not there.
    if given.get("default"):
        made["default"] = given["default"]
    return made


def _typed(given: Json, parts: dict[str, Json]) -> Json:
    if "$ref" in given:
        return _object(given["$ref"].removeprefix(_PLACES), parts)
    made = {key: value for key, value in given.items() if key != "default"}
    if "enum" in given:
        return {"type": "string", **made}
    if given["type"] == "array":
        made |= {"maxItems": _MOST_ITEMS, "x-kubernetes-list-type": "atomic"}
        made["items"] = _typed(given["items"], parts)
    return made
