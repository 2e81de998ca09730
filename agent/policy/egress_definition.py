"""The words and rules of HostEgressPolicies' schema, as definition.py has those of
HostAccessPolicies."""

from typing import Any, Final

from agent.policy import api_types, egress_types
from bpf.rules import MAX_PORT

Json = dict[str, Any]

DESCRIPTIONS: Final = {
    "EgressSpecField": {
        "subjects": "The host processes that the policy is about: any of these.",
        "deny": "The destinations that they may not connect or send to: any of these.",
        "except": "Subjects that may, though the policy selects them. Default: none.",
        "nodeSelector": "The nodes on which the policy is in force. Default: all.",
        "action": "Audit: the policy denies nothing, and what it would deny is counted.",
    },
    "SubjectField": {
        "hostNetworkPods": "Pods with hostNetwork. All fields must match; podSelector: {} is all "
        "of them, without podgate's own.",
        "systemdUnit": "Sockets and processes in a unit's cgroup and below.",
    },
    "DestinationField": {
        "cidr": "Addresses, for instance 10.0.0.0/8 or fd00::1/128.",
        "preset": "Metadata: 169.254.169.254 and fd00:ec2::254. Kubelet, Etcd: their ports at all "
        "of the host's addresses. Loopback: 127.0.0.0/8 and ::1.",
        "ports": "The ports of the cidr: any of these. Default: all, of every protocol.",
    },
    "EgressPortField": {
        "protocol": "TCP (default), UDP, SCTP, ICMP (both families), or an IP protocol number.",
        "port": "The destination's port, or the first of a range. Default: all.",
        "endPort": "The last port of a range.",
    },
}

LIMITS: Final[dict[tuple[str, str], Json]] = {
    ("DestinationField", "cidr"): {"pattern": "^[0-9A-Fa-f:.]+(/[0-9]{1,3})?$", "maxLength": 49},
    ("EgressPortField", "protocol"): {
        "minimum": 1,
        "maximum": 255,
        "pattern": f"^({'|'.join(api_types.PROTOCOLS)})$",
    },
    ("EgressPortField", "port"): {"minimum": 1, "maximum": MAX_PORT},
}

_SUBJECTS: Final = "has(self.hostNetworkPods) != has(self.systemdUnit)"
RULES: Final[dict[str, tuple[tuple[str, str, str], ...]]] = {
    "SubjectField": ((_SUBJECTS, f"set exactly one of {egress_types.SUBJECTS}", ""),),
    "DestinationField": (
        (
            "has(self.cidr) != has(self.preset)",
            f"set exactly one of {egress_types.DESTINATIONS}",
            "",
        ),
        (
            "!has(self.ports) || has(self.cidr)",
            "a preset has its own ports; name a cidr instead",
            ".ports",
        ),
        (
            "!has(self.cidr) || isCIDR(self.cidr) && cidr(self.cidr) == cidr(self.cidr).masked() "
            "|| isIP(self.cidr)",
            "not an address or range without host bits",
            ".cidr",
        ),
    ),
    "EgressPortField": (
        (
            "has(self.protocol) || has(self.port)",
            "name protocol or port; without ports all are denied",
            "",
        ),
        (
            "!has(self.endPort) || (has(self.port) && self.endPort >= self.port)",
            "endPort needs a port that is not greater",
            ".endPort",
        ),
        (
            "!has(self.port) || !has(self.protocol) || (type(self.protocol) == int ? "
            f"self.protocol in [{', '.join(map(str, sorted(api_types.WITH_PORTS)))}] : "
            "self.protocol != 'ICMP')",
            "this protocol has no ports; leave port out",
            ".port",
        ),
    ),
}

COLUMNS: Final = (
    ("Accepted", "string", ".status.conditions[?(@.type=='Accepted')].status", 0),
    ("Programmed", "string", ".status.conditions[?(@.type=='Programmed')].status", 0),
    ("Action", "string", ".spec.action", 0),
    ("Subjects", "string", ".spec.subjects", 1),
    ("Deny", "string", ".spec.deny", 1),
    ("Age", "date", ".metadata.creationTimestamp", 0),
)
