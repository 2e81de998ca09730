"""The CustomResourceDefinitions of policies, generated from the structs of api_types.py and
egress_types.py.

Structural, and without unknown fields: with strict validation (`fieldValidation=Strict`, kubectl's
default, and always for server-side apply) the API server names a misspelt one. Other clients have
it pruned, so an empty selector, source or port is invalid: what remains of a misspelt one.
"""

import dataclasses
from typing import Any, Final

import msgspec
import yaml

from agent import labels
from agent.policy import api_types, egress_definition
from agent.policy.api_types import HOST_ACCESS, SpecField
from agent.policy.egress_types import HOST_EGRESS, EgressSpecField
from agent.policy.kinds import PolicyKind
from bpf.rules import MAX_PORT

Json = dict[str, Any]

_PLACES: Final = "#/components/"
# The API server estimates a CEL rule's cost by how often it may be evaluated. A gate holds 32
# rules, and adjacent ports are one.
_MAX_ITEMS: Final = 256

_DESCRIPTIONS: Final = {
    "SpecField": {
        "pods": "The pods that may be reached. All fields must match; podSelector: {} is all pods.",
        "from": "The admitted sources: any of these.",
        "ports": "The ports they may use: any of these. Default: all.",
        "nodeSelector": "The nodes on which the policy is in force. Default: all.",
        "action": "Audit: the policy admits nothing, and what it would admit is counted.",
        "expires": "When it stops admitting anything. Default: never.",
    },
    "PodSelector": {
        "namespaces": "The pods' namespaces. Default: all.",
        "podSelector": "The pods' labels. Default: all pods.",
        "namespaceSelector": "Labels of the pods' namespaces. Default: all.",
    },
    "LabelSelector": {
        "matchLabels": "Labels that the pod must have, with these values.",
        "matchExpressions": "More conditions on the pod's labels.",
    },
    "Requirement": {
        "key": "The label.",
        "operator": "In and NotIn need values, Exists and DoesNotExist take none.",
        "values": "NotIn and DoesNotExist match pods without the label.",
    },
    "FromField": {
        "anyProcess": "Any process of the node, and its kernel.",
        "kernel": "Packets of the node's kernel without a socket.",
        "cgroup": "Sockets created in a cgroup.",
        "systemdUnit": "Sockets created in a unit's cgroup and below, in whichever slice it is.",
        "hostNetworkPods": "Pods with hostNetwork on the pod's node. All fields must match; "
        "podSelector: {} is all of them.",
    },
    "EmptyObject": {},
    "UnitField": {"name": "Of a service, scope or slice, for instance containerd.service."},
    "CgroupField": {
        "path": "As in /proc/PID/cgroup, for instance /system.slice/name.service.",
        "match": "subtree: and all cgroups below it.",
    },
    "PortField": {
        "protocol": "TCP (default), UDP, SCTP, ICMP (both families), or an IP protocol number.",
        "port": "The pod's port, the first of a range, or a container port's name. Default: all.",
        "endPort": "The last port of a range.",
    },
    **egress_definition.DESCRIPTIONS,
}

# What `api_types.check` validates in addition to types.
_LIMITS: Final[dict[tuple[str, str], Json]] = {
    # Without the parts "." and "..".
    ("CgroupField", "path"): {"pattern": r"^/$|^(/([^/.][^/]*|\.[^/.][^/]*|\.\.[^/]+))+$"},
    ("UnitField", "name"): {
        "pattern": f"^{api_types.UNIT_NAME}$",
        "maxLength": api_types.MAX_UNIT_NAME,
    },
    ("PortField", "protocol"): {
        "minimum": 1,
        "maximum": 255,
        "pattern": f"^({'|'.join(api_types.PROTOCOLS)})$",
    },
    ("PortField", "port"): {
        "minimum": 1,
        "maximum": MAX_PORT,
        "pattern": f"^{api_types.PORT_NAME}$",
        "maxLength": api_types.MAX_PORT_NAME,
    },
    **egress_definition.LIMITS,
}
_NUMBERED: Final = ", ".join(map(str, sorted(api_types.WITH_PORTS)))
_SOURCES: Final = ", ".join(
    f"has(self.{name})" for name in api_types.FromField.__struct_encode_fields__
)
# What no other keyword can express: rules in CEL, each with its message and the field to name.
_RULES: Final[dict[str, tuple[tuple[str, str, str], ...]]] = {
    "Requirement": (
        (
            "self.operator in ['In', 'NotIn'] ? has(self.values) && size(self.values) > 0 : "
            "!has(self.values) || size(self.values) == 0",
            "In and NotIn need values, Exists and DoesNotExist take none",
            ".values",
        ),
    ),
    "PodSelector": (
        (
            "has(self.namespaces) || has(self.namespaceSelector) || has(self.podSelector)",
            "name namespaces, namespaceSelector or podSelector; podSelector: {} selects all pods",
            "",
        ),
    ),
    "FromField": (
        (
            f"[{_SOURCES}].filter(one, one).size() == 1",
            f"set exactly one of {api_types.SOURCES}",
            "",
        ),
    ),
    "PortField": (
        (
            "has(self.protocol) || has(self.port)",
            "name protocol or port; without ports all are admitted",
            "",
        ),
        (
            "!has(self.endPort) || (has(self.port) && type(self.port) == int && "
            "self.endPort >= self.port)",
            "endPort needs a port that is a number and not greater",
            ".endPort",
        ),
        (
            "!has(self.port) || !has(self.protocol) || (type(self.protocol) == int ? "
            f"self.protocol in [{_NUMBERED}] : self.protocol != 'ICMP')",
            "this protocol has no ports; leave port out",
            ".port",
        ),
    ),
    **egress_definition.RULES,
}
_CONDITIONS: Final = (
    "Accepted: whether the spec is valid. Programmed: whether it is in force on all selected nodes."
)
# As metav1.Condition (k8s.io/apimachinery/pkg/apis/meta/v1/types.go).
_CONDITION: Final[dict[str, Json]] = {
    "type": {"type": "string", "maxLength": 316},
    "status": {"type": "string", "enum": ["True", "False", "Unknown"]},
    "observedGeneration": {"type": "integer", "format": "int64", "minimum": 0},
    "lastTransitionTime": {"type": "string", "format": "date-time"},
    "reason": {
        "type": "string",
        "minLength": 1,
        "maxLength": 1024,
        "pattern": "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$",
    },
    "message": {"type": "string", "maxLength": 32768},
}
_REQUIRED_OF_CONDITION: Final = ("type", "status", "lastTransitionTime", "reason", "message")
_NODES: Final = {
    "selected": "Nodes that nodeSelector selects.",
    "programmed": "Those on which the newest generation is in force.",
    "failed": "Those that report a problem with it.",
}

_COLUMNS: Final = (
    ("Accepted", "string", ".status.conditions[?(@.type=='Accepted')].status", 0),
    ("Programmed", "string", ".status.conditions[?(@.type=='Programmed')].status", 0),
    ("Action", "string", ".spec.action", 0),
    ("Namespaces", "string", ".spec.pods.namespaces", 0),
    ("From", "string", ".spec.from", 1),
    ("Ports", "string", ".spec.ports", 1),
    ("Age", "date", ".metadata.creationTimestamp", 0),
)


@dataclasses.dataclass(frozen=True, slots=True)
class _Resource:
    """What differs between the definitions. page: that describes it, in docs/."""

    kind: PolicyKind[Any]
    spec: type[msgspec.Struct]
    module: str
    page: str
    short_name: str
    description: str
    columns: tuple[tuple[str, str, str, int], ...]


_RESOURCES: Final = {
    one.kind.name: one
    for one in (
        _Resource(
            *(HOST_ACCESS, SpecField, "api_types", "rules.md", "hap"),
            "Admits sources on a node to start flows to its pods.",
            _COLUMNS,
        ),
        _Resource(
            *(HOST_EGRESS, EgressSpecField, "egress_types", "guides/host-egress.md", "hep"),
            "Keeps hostNetwork pods and systemd units from destinations.",
            egress_definition.COLUMNS,
        ),
    )
}


class _Dumper(yaml.SafeDumper):
    """Without anchors: parts of the schema occur more than once."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def manifest(kind: str = labels.POLICY_KIND) -> str:
    """The definition as a file of the chart."""
    resource = _RESOURCES[kind]
    head = (
        f"# Generated by `make docs` from agent/policy/{resource.module}.py; "
        f"docs/{resource.page} describes it.\n"
    )
    return head + yaml.dump(definition(kind), Dumper=_Dumper, sort_keys=False, width=100)


def definition(kind: str = labels.POLICY_KIND) -> Json:
    """The object, as it is applied."""
    resource = _RESOURCES[kind]
    plural, group = resource.kind.plural, labels.POLICY_GROUP
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{plural}.{group}",
            "labels": {"app.kubernetes.io/name": "podgate"},
            # `helm uninstall` keeps it, since all policies would be deleted with it.
            "annotations": {"helm.sh/resource-policy": "keep"},
        },
        "spec": {
            "group": group,
            "scope": "Cluster",
            "names": {
                "kind": kind,
                "listKind": f"{kind}List",
                "plural": plural,
                "singular": kind.lower(),
                "shortNames": [resource.short_name],
                "categories": ["podgate"],
            },
            "versions": [
                {
                    "name": labels.POLICY_VERSION,
                    "served": True,
                    "storage": True,
                    "subresources": {"status": {}},
                    "additionalPrinterColumns": [
                        {"name": name, "type": type_, "jsonPath": path, "priority": priority}
                        for name, type_, path, priority in resource.columns
                    ],
                    "schema": {"openAPIV3Schema": schema(kind)},
                }
            ],
        },
    }


def schema(kind: str = labels.POLICY_KIND) -> Json:
    """The structural schema of one object."""
    resource = _RESOURCES[kind]
    _, parts = msgspec.json.schema_components((resource.spec,), ref_template=_PLACES + "{name}")
    return {
        "description": resource.description,
        "type": "object",
        "required": ["spec"],
        "properties": {"spec": _object(resource.spec.__name__, parts), "status": _status()},
    }


def _status() -> Json:
    """What `podgate controller` writes."""
    return {
        "description": "The state over all nodes, as `podgate controller` last saw it.",
        "type": "object",
        "properties": {
            "observedGeneration": {
                "description": "The generation of the spec that this status is about.",
                "type": "integer",
                "format": "int64",
                "minimum": 0,
            },
            "conditions": {
                "description": _CONDITIONS,
                "type": "array",
                "maxItems": 8,
                "x-kubernetes-list-type": "map",
                "x-kubernetes-list-map-keys": ["type"],
                "items": {
                    "type": "object",
                    "required": list(_REQUIRED_OF_CONDITION),
                    "properties": _CONDITION,
                },
            },
            "nodes": {
                "description": "Numbers of nodes.",
                "type": "object",
                "properties": {
                    name: {"description": text, "type": "integer", "format": "int32", "minimum": 0}
                    for name, text in _NODES.items()
                },
            },
        },
    }


def _object(name: str, parts: dict[str, Json]) -> Json:
    """One struct."""
    given, required = parts[name]["properties"], parts[name]["required"]
    made: Json = {"type": "object"}
    if name == "LabelSelector":
        # As everywhere in the API: two appliers do not merge theirs.
        made["x-kubernetes-map-type"] = "atomic"
    if required:
        made["required"] = required
    if rules := _RULES.get(name):
        made["x-kubernetes-validations"] = [
            {"rule": rule, "message": message} | ({"fieldPath": path} if path else {})
            for rule, message, path in rules
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


def _field(given: Json, parts: dict[str, Json]) -> Json:
    """One field's schema, from msgspec's schema of its type."""
    kinds = [one for one in given.get("anyOf", [given]) if one != {"type": "null"}]
    made = _typed(kinds[0], parts) if len(kinds) == 1 else {"x-kubernetes-int-or-string": True}
    # Empty values and null equal a missing field.
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
        made |= {"maxItems": _MAX_ITEMS, "x-kubernetes-list-type": "atomic"}
        made["items"] = _typed(given["items"], parts)
    return made
