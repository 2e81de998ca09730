"""The webhook's certificate: made by the leader, stored in a Secret, renewed before it expires.

It is its own authority: clients trust exactly the certificates that are served, and no key signs
anything else. A new one is first trusted, then served, so that no request meets one that the API
server does not trust yet.
"""

import base64
import dataclasses
import datetime
from typing import Any, Final

import msgspec

from agent.kube import responses, self_signed
from agent.kube.self_signed import KeyPair

SECRET_NAME: Final = "podgate-controller-tls"  # noqa: S105  a name

LIFETIME: Final = datetime.timedelta(days=90)
RENEWED_BEFORE: Final = LIFETIME / 3
"""Before the end: a month to notice that renewal fails."""
TRUSTED_BEFORE: Final = datetime.timedelta(minutes=10)
"""Between trust and use: API servers read a changed configuration within seconds."""
# Up to 64 characters; clients read the alternative names.
_NAME: Final = "podgate-controller"


@dataclasses.dataclass(frozen=True, slots=True)
class Certificates:
    """Content of the Secret."""

    serving: KeyPair
    next: KeyPair | None = None
    """Trusted already, and served later."""
    retired: bytes = b""
    """The previous certificate, until it expires: a replica may still serve it."""

    @property
    def trusted(self) -> bytes:
        """All that clients trust: the caBundle, PEM."""
        following = self.next.certificate if self.next else b""
        return self.serving.certificate + following + self.retired


class _SecretData(msgspec.Struct, rename={"serving_key": "tls.key", "serving": "tls.crt"}):
    serving: str
    serving_key: str
    next: str = msgspec.field(default="", name="next.crt")
    next_key: str = msgspec.field(default="", name="next.key")
    retired: str = msgspec.field(default="", name="retired.crt")


class _Secret(msgspec.Struct):
    data: _SecretData


def read(content: bytes) -> Certificates | None:
    """The content of a Secret's JSON; None if it is not usable and a new one is needed."""
    try:
        data = responses.decode(content, _Secret).data
        found = Certificates(
            KeyPair(base64.b64decode(data.serving), base64.b64decode(data.serving_key)),
            KeyPair(base64.b64decode(data.next), base64.b64decode(data.next_key))
            if data.next
            else None,
            base64.b64decode(data.retired),
        )
        for pair in (found.serving, found.next):
            if pair:
                pair.check()
    except (msgspec.DecodeError, ValueError):
        return None
    return found


def secret(found: Certificates) -> dict[str, Any]:
    """The Secret's `data`."""
    data = {
        "tls.crt": found.serving.certificate,
        "tls.key": found.serving.key,
        "next.crt": found.next.certificate if found.next else b"",
        "next.key": found.next.key if found.next else b"",
        "retired.crt": found.retired,
    }
    return {name: base64.b64encode(value).decode() for name, value in data.items()}


def following(
    found: Certificates | None, names: list[str], now: datetime.datetime
) -> Certificates | None:
    """What is to be stored in place of `found`; None if it stays. names: of the service."""
    if found is None or not found.serving.is_for(names) or not found.serving.is_valid(now):
        # Also the case at installation, and after a leader whose clock was ahead. Requests fail
        # until it is trusted; pods start without.
        return Certificates(self_signed.certificate(_NAME, names, now, LIFETIME))
    if found.next and not found.next.is_valid(now):
        return dataclasses.replace(found, next=None)
    if found.next and now - found.next.made >= TRUSTED_BEFORE:
        return Certificates(found.next, retired=found.serving.certificate)
    if found.next is None and found.serving.expires - now < RENEWED_BEFORE:
        return dataclasses.replace(found, next=self_signed.certificate(_NAME, names, now, LIFETIME))
    if found.retired and now >= self_signed.expiry(found.retired):
        return dataclasses.replace(found, retired=b"")
    return None
