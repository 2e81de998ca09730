"""Validation of reported conditions at the edge; each mistake is one sentence."""

import re

import grpc

from agent.api.conditions.owner import ConditionOwner
from agent.client.v1alpha1 import conditions_pb2
from agent.pods.conditions import FALSE, TRUE, UNKNOWN

OWNER_GONE = "OwnerGone"
SANDBOX_CHANGED = "SandboxChanged"
_OF_PODGATE = frozenset({OWNER_GONE, SANDBOX_CHANGED})
_STATUSES = (TRUE, FALSE, UNKNOWN)

# The part behind the slash of a qualified name (k8s.io/apimachinery/pkg/util/validation).
_NAME = re.compile(r"([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]")
_MAX_NAME = 63
# As metav1.Condition; podgate's own are shorter than this.
_REASON = re.compile(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?")
_MAX_REASON = 128
# With the sandbox and the boot it fits into 1,024 characters.
_MAX_MESSAGE = 900


class RejectedError(Exception):
    """A request is rejected; the message is one sentence."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code


def check_type(kind: str, owner: ConditionOwner) -> None:
    """Raises `RejectedError`."""
    domain, separator, name = kind.partition("/")
    if not separator or len(name) > _MAX_NAME or not _NAME.fullmatch(name):
        raise _invalid(f"type {kind[:400]!r} is not DOMAIN/NAME, such as {owner.domain}/healthy")
    if domain != owner.domain:
        raise RejectedError(
            grpc.StatusCode.PERMISSION_DENIED,
            f"type {kind[:400]} is not of the domain {owner.domain}; open a stream as its owner",
        )


def check(condition: conditions_pb2.Condition, owner: ConditionOwner) -> None:
    """Raises `RejectedError`."""
    check_type(condition.type, owner)
    if condition.status not in _STATUSES:
        raise _invalid(f"status {condition.status[:64]!r} is not True, False or Unknown")
    reason = condition.reason
    if len(reason) > _MAX_REASON or not _REASON.fullmatch(reason):
        raise _invalid(
            f"reason {reason[:_MAX_REASON]!r} is not one word in CamelCase of up to {_MAX_REASON} "
            "characters"
        )
    if reason in _OF_PODGATE:
        raise _invalid(f"reason {reason} is podgate's own; use another word")
    if len(condition.message) > _MAX_MESSAGE:
        raise _invalid(f"message has more than {_MAX_MESSAGE} characters")
    if not condition.message.isprintable():
        raise _invalid("message has characters that are not printable; write one line of text")


def _invalid(message: str) -> RejectedError:
    return RejectedError(grpc.StatusCode.INVALID_ARGUMENT, message)
