"""What a check of a pod's network policies found: reason and message of its condition."""

from typing import Final

import msgspec

PROGRAMMED: Final = "PoliciesProgrammed"
NO_POLICIES: Final = "NoPolicies"
UNCONFIRMED: Final = "PoliciesUnconfirmed"
"""True after the time-out, by the owner's choice."""

PENDING: Final = "PoliciesPending"
"""False within the time-out, whatever is missing."""
NOT_PROGRAMMED: Final = "PoliciesNotProgrammed"
NO_WITNESS: Final = "WitnessMissing"
UNKNOWN: Final = "PoliciesUnknown"
FAILED: Final = "PolicyCheckFailed"
OFF: Final = "PolicyChecksOff"


class Outcome(msgspec.Struct, frozen=True):
    """One sentence, and its reason."""

    reason: str
    message: str

    @property
    def is_ready(self) -> bool:
        return self.reason in (PROGRAMMED, NO_POLICIES, UNCONFIRMED)


NETWORK_OF_HOST: Final = Outcome(
    NO_POLICIES, "NetworkPolicies do not apply to pods on the host network."
)
NOT_CHECKED: Final = Outcome(
    OFF,
    "This agent does not check network policies (--policy-ready=off), and the pod has a readiness "
    "gate for them.",
)
