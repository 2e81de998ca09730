"""`podgate webhook-certificate`: what a Job of the installation does once, and then may no more.

It makes the certificate of the controller's webhooks, writes it as their caBundle and into the
Secret that the controller's pods mount, deletes what controllers of previous versions wrote, and
last its own bindings: afterwards no account of podgate's has a right to webhooks. Repeating it
after an error continues where it stopped.
"""

import asyncio
import base64
import datetime
import json
from collections.abc import Callable, Collection, Iterator

import structlog

from agent import labels
from agent.controller import certificates, review
from agent.errors import PodgateError
from agent.kube.client import APPLY, STRATEGIC_MERGE, ApiClient, ApiError
from agent.logs import Event

log = structlog.get_logger(__name__)

NAME = "podgate-webhook-certificate"
"""Of the Job, its account and its bindings, as the chart has them."""

CONFIGURATIONS = {
    "mutatingwebhookconfigurations/podgate-webhook-inject": tuple(
        f"inject-{gate.removeprefix(f'{labels.DOMAIN}/')}.{labels.DOMAIN}"
        for gate in review.INJECT_PATHS
    ),
    "validatingwebhookconfigurations/podgate-webhook-probe-spec": (f"probe-spec.{labels.DOMAIN}",),
}
"""Of the chart, each with its webhooks' names."""

OBSOLETE = (
    "mutatingadmissionpolicybindings/podgate-inject-isolation-ready",
    "mutatingadmissionpolicybindings/podgate-inject-probes-passing",
    "mutatingadmissionpolicies/podgate-inject-isolation-ready",
    "mutatingadmissionpolicies/podgate-inject-probes-passing",
    "mutatingwebhookconfigurations/podgate-inject",
    "validatingwebhookconfigurations/podgate-probe-spec",
)
"""What controllers up to 0.1 wrote by themselves."""

_ADMISSION = "/apis/admissionregistration.k8s.io/v1"
_RBAC = "/apis/rbac.authorization.k8s.io/v1"
# That of controllers that wrote the Secret by themselves: it drops the fields that only they had.
_MANAGER = {"fieldManager": "podgate-controller", "force": "true"}
# kubectl applies webhooks last; the Job starts a container meanwhile.
_APPLIED_SECONDS = 60.0
_RETRY_SECONDS = 1.0


class WebhookCertificateError(PodgateError):
    """The API server rejects a request of the Job; the sentence has what and why."""


def _utc_now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


async def run(kubeconfig: str | None, namespace: str, configurations: Collection[str]) -> None:
    """As `install`. Raises `NoClusterConfigError` and `WebhookCertificateError`."""
    api = await ApiClient.open(kubeconfig)
    try:
        await install(api, namespace, configurations)
    finally:
        await api.aclose()


async def install(
    api: ApiClient,
    namespace: str,
    configurations: Collection[str],
    *,
    now: Callable[[], datetime.datetime] = _utc_now,
) -> None:
    """Do all of it once. Raises `WebhookCertificateError`.

    :param namespace: podgate's own, of the service and of the Secret.
    :param configurations: those of `CONFIGURATIONS` that are installed.
    :param now: in UTC.
    """
    try:
        await _ensure_certificate(api, namespace, configurations, now())
        for path in OBSOLETE:
            await _delete(api, f"{_ADMISSION}/{path}")
        for path in own_bindings(namespace):
            await _delete(api, path)
    except ApiError as error:
        raise WebhookCertificateError(
            f"the webhooks' certificate is not installed ({error}); the Job tries again"
        ) from error


def own_bindings(namespace: str) -> Iterator[str]:
    """Paths of the Job's bindings. The last one grants their deletion."""
    yield f"{_RBAC}/namespaces/{namespace}/rolebindings/{NAME}"
    yield f"{_RBAC}/clusterrolebindings/{NAME}"


def secret_path(namespace: str) -> str:
    return f"/api/v1/namespaces/{namespace}/secrets/{certificates.SECRET_NAME}"


async def _ensure_certificate(
    api: ApiClient, namespace: str, configurations: Collection[str], now: datetime.datetime
) -> None:
    content = await _read_secret(api, namespace)
    found = certificates.read(content) if content else None
    names = certificates.service_names(namespace)
    # Keys and signatures take milliseconds of CPU.
    stored = await asyncio.to_thread(certificates.following, found, names, now)
    # First trusted, then served.
    for path in configurations:
        await _trust(api, path, stored.trusted)
    if stored is found:
        return
    metadata: dict[str, object] = {
        "name": certificates.SECRET_NAME,
        "namespace": namespace,
        "labels": {"app.kubernetes.io/name": certificates.SERVICE_NAME},
    }
    if content:
        # Another Job may have written it since.
        metadata["resourceVersion"] = json.loads(content)["metadata"]["resourceVersion"]
    body = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata,
        "data": certificates.secret(stored),
    }
    path = secret_path(namespace)
    await api.request("PATCH", path, query=_MANAGER, body=body, content_type=APPLY)
    log.info(Event.CERTIFICATE_RENEWED, expires=stored.serving.expires.isoformat())


async def _trust(api: ApiClient, path: str, trusted: bytes) -> None:
    """Have the API server trust certificates (PEM) of a configuration's webhooks."""
    bundle = base64.b64encode(trusted).decode()
    webhooks = [
        {"name": name, "clientConfig": {"caBundle": bundle}} for name in CONFIGURATIONS[path]
    ]
    loop = asyncio.get_running_loop()
    end = loop.time() + _APPLIED_SECONDS
    while True:
        try:
            await api.request(
                "PATCH",
                f"{_ADMISSION}/{path}",
                body={"webhooks": webhooks},
                content_type=STRATEGIC_MERGE,
            )
            return
        except ApiError as error:
            if error.code != 404 or loop.time() >= end:
                raise
        await asyncio.sleep(_RETRY_SECONDS)


async def _read_secret(api: ApiClient, namespace: str) -> bytes | None:
    """None if there is none."""
    try:
        return await api.request("GET", secret_path(namespace))
    except ApiError as error:
        if error.code == 404:
            return None
        raise


async def _delete(api: ApiClient, path: str) -> None:
    try:
        await api.request("DELETE", path)
    except ApiError as error:
        if error.code != 404:
            raise
