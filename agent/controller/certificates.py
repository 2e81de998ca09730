"""The webhook's certificate: the Secret's content, and when an installation replaces it.

A Job of the installation makes it, as `podgate webhook-certificate`. It is its own authority:
clients trust exactly the certificate that is served, and no key signs anything else. The previous
one stays trusted until it expires, since replicas serve it until the kubelet has written the new
one.
"""

import base64
import dataclasses
import datetime

import msgspec

from agent.kube import responses, self_signed
from agent.kube.self_signed import KeyPair

SECRET_NAME = "podgate-controller-tls"  # noqa: S105  a name
SERVICE_NAME = "podgate-controller"

LIFETIME = datetime.timedelta(days=3650)
"""As of kubeadm's authorities: nothing renews it but an installation, and cert-manager."""
REPLACED_AFTER = datetime.timedelta(days=365)
"""By the next installation or upgrade."""


@dataclasses.dataclass(frozen=True, slots=True)
class Certificates:
    """Content of the Secret."""

    serving: KeyPair
    trusted: bytes
    """All that clients trust: the caBundle, PEM. Replicas may still serve the previous one."""


class _SecretData(
    msgspec.Struct,
    rename={"serving_key": "tls.key", "serving": "tls.crt", "trusted": "ca.crt"},
):
    serving: str
    serving_key: str
    trusted: str = ""


class _Secret(msgspec.Struct):
    data: _SecretData


def read(content: bytes) -> Certificates | None:
    """The content of a Secret's JSON; None if it is not usable."""
    try:
        data = responses.decode(content, _Secret).data
        serving = KeyPair(base64.b64decode(data.serving), base64.b64decode(data.serving_key))
        serving.check()
        # A Secret of a previous version has only what is served.
        return Certificates(serving, base64.b64decode(data.trusted) or serving.certificate)
    except ValueError:
        return None


def secret(stored: Certificates) -> dict[str, str]:
    """The Secret's `data`, with the names of cert-manager."""
    data = {
        "ca.crt": stored.trusted,
        "tls.crt": stored.serving.certificate,
        "tls.key": stored.serving.key,
    }
    return {name: base64.b64encode(value).decode() for name, value in data.items()}


def following(found: Certificates | None, names: list[str], now: datetime.datetime) -> Certificates:
    """What is to be stored in place of `found`: the same, or a new one. names: of the service."""
    usable = found if found and _is_usable(found.serving, names, now) else None
    if usable and now - usable.serving.made < REPLACED_AFTER and _is_lasting(usable.serving, now):
        return usable
    made = self_signed.certificate(SERVICE_NAME, names, now, LIFETIME)
    previous = usable.serving.certificate if usable else b""
    return Certificates(made, made.certificate + previous)


def service_names(namespace: str) -> list[str]:
    """DNS names of the service; the API server uses the first one."""
    service = f"{SERVICE_NAME}.{namespace}"
    return [f"{service}.svc", service, f"{service}.svc.cluster.local"]


def _is_usable(found: KeyPair, names: list[str], now: datetime.datetime) -> bool:
    """Not one of the future: after an installation from a machine whose clock was ahead."""
    return found.is_for(names) and found.is_valid(now)


def _is_lasting(found: KeyPair, now: datetime.datetime) -> bool:
    """Certificates of previous versions are valid for 90 days, and were renewed by controllers."""
    return found.expires - now > LIFETIME / 2
