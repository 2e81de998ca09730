"""Names of labels, annotations, conditions and kinds in the API and in manifests."""

from typing import Final

DOMAIN = "podgate.io"

ISOLATION_READY = f"{DOMAIN}/isolation-ready"
PROBES_PASSING = f"{DOMAIN}/probes-passing"
POLICY_READY = f"{DOMAIN}/policy-ready"

MODE_LABEL = f"{DOMAIN}/mode"
MAX_MODE_LABEL = f"{DOMAIN}/max-mode"
"""Of a node: the ceiling of all modes there. Of podgate's own namespace: of the whole cluster."""
OVERRIDE_LABEL = f"{DOMAIN}/mode-override"
"""Of namespaces: whether labels of pods may be less strict."""
OVERRIDE_ALLOWED = "allowed"

LEFT_LABEL = f"{DOMAIN}/left-behind"
"""Of namespaces and nodes: the value of their mode label when podgate was removed, empty for none.
While both are equal, mode labels do not close pods: the next installation has no policies yet."""

INJECT_LABEL = f"{DOMAIN}/inject"
"""Of namespaces: which readiness gates their new pods get (agent/controller/injection.py)."""

VERIFY_LABEL = f"{DOMAIN}/verify"
"""Of pods that `kubectl podgate verify` may try to reach: "true"."""

# Read from manifests only, which the node's operator wrote; ignored in API objects.
NETNS_ANNOTATION = f"{DOMAIN}/netns"

# "off": the relay does not proxy the kubelet's connections to this pod.
RELAY_ANNOTATION = f"{DOMAIN}/relay"

TRAFFIC_DROPPED = "TrafficDropped"
TRAFFIC_WOULD_DROP = "TrafficWouldDrop"
"""Reasons of Events of pods: what their gates drop, or in audit would drop."""

OWNER_KIND: Final = "ConditionOwner"
OWNER_PLURAL = "conditionowners"
OWNER_API_VERSION: Final = "podgate.io/v1alpha1"

NAME: Final = "app.kubernetes.io/name"
WITNESS_NAME: Final = "podgate-witness"
"""Its value on pods of podgate's namespace from which, and to which, policies are tried."""
OWN_NAME: Final = "podgate"
"""Its value on podgate's own objects."""

POLICY_KIND: Final = "HostAccessPolicy"
POLICY_PLURAL = "hostaccesspolicies"
EGRESS_KIND: Final = "HostEgressPolicy"
EGRESS_PLURAL = "hostegresspolicies"
POLICY_KINDS = (POLICY_KIND, EGRESS_KIND)
POLICY_GROUP = f"policy.{DOMAIN}"
POLICY_VERSION = "v1alpha1"
POLICY_API_VERSION: Final = "policy.podgate.io/v1alpha1"
