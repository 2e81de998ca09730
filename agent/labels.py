"""Names that pods, manifests and the API carry."""

from typing import Final

DOMAIN = "podgate.io"

ISOLATION_READY = f"{DOMAIN}/isolation-ready"
PROBES_PASSING = f"{DOMAIN}/probes-passing"

MODE_LABEL = f"{DOMAIN}/mode"

# Counts only in manifests, which the node's owner wrote; never from the API.
NETNS_ANNOTATION = f"{DOMAIN}/netns"

# "off": the kubelet's connections to this pod are not carried by the relay.
RELAY_ANNOTATION = f"{DOMAIN}/relay"

POLICY_KIND: Final = "HostAccessPolicy"
POLICY_PLURAL: Final = "hostaccesspolicies"
POLICY_GROUP: Final = f"policy.{DOMAIN}"
POLICY_VERSION: Final = "v1alpha1"
POLICY_API_VERSION: Final = "policy.podgate.io/v1alpha1"
