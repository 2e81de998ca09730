"""The component that writes the webhook's certificate and podgate's admission objects.

All of these are applied (server-side apply) once a minute: what is as desired does not change, and
what was changed or deleted comes back. They belong to the ClusterRole of the controller, so the API
server's garbage collector removes them with it.
"""

import asyncio
import base64
import datetime
import json
import random
from collections.abc import Callable
from typing import Final

import msgspec
import structlog

from agent import backoff
from agent.controller import certificates, injection, review
from agent.controller.certificates import Certificates
from agent.controller.injection import Json
from agent.kube.client import APPLY, ApiClient, ApiError
from agent.labels import DOMAIN
from agent.logs import Event
from probes.spec import probespec

log = structlog.get_logger(__name__)

SERVICE_NAME: Final = "podgate-controller"
WEBHOOK_PORT: Final = 9443

_GROUP: Final = "/apis/admissionregistration.k8s.io/v1"
_ROLE_PATH: Final = "/apis/rbac.authorization.k8s.io/v1/clusterroles/podgate-controller"
_MANAGER: Final = {"fieldManager": "podgate-controller", "force": "true"}
_PERIOD_SECONDS: Final = 60.0
_PLURALS: Final = {
    "MutatingAdmissionPolicy": "mutatingadmissionpolicies",
    "MutatingAdmissionPolicyBinding": "mutatingadmissionpolicybindings",
    "MutatingWebhookConfiguration": "mutatingwebhookconfigurations",
    "ValidatingWebhookConfiguration": "validatingwebhookconfigurations",
}


def _utc_now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


class _Resource(msgspec.Struct):
    name: str


class _ResourceList(msgspec.Struct):
    """metav1.APIResourceList, of discovery."""

    resources: list[_Resource] = []


class _OwnerMetadata(msgspec.Struct):
    uid: str


class _Owner(msgspec.Struct):
    metadata: _OwnerMetadata


class Admission:
    """Ensures the certificate, then the objects that need it."""

    def __init__(
        self,
        api: ApiClient,
        namespace: str,
        *,
        now: Callable[[], datetime.datetime] = _utc_now,
        jitter: backoff.Jitter = random.random,
    ) -> None:
        """namespace: podgate's own, of the service and of the Secret."""
        self._api = api
        self._namespace = namespace
        self._now = now
        self._backoff = backoff.Backoff(base_seconds=1.0, cap_seconds=60.0, jitter=jitter)

    async def run(self) -> None:
        while True:
            try:
                found = await self._ensure_certificates()
                await self._apply_objects(found)
            except ApiError as error:
                if not self._backoff.failures:
                    log.warning(Event.ADMISSION_NOT_WRITTEN, error=str(error), code=error.code)
                seconds = max(error.retry_after_seconds, self._backoff.next_seconds())
            else:
                self._backoff.reset()
                seconds = _PERIOD_SECONDS
            await asyncio.sleep(seconds)

    async def _ensure_certificates(self) -> Certificates:
        path = secret_path(self._namespace)
        found, version = await read_secret(self._api, self._namespace)
        names = service_names(self._namespace)
        # Keys and signatures take milliseconds of CPU.
        stored = await asyncio.to_thread(certificates.following, found, names, self._now())
        if stored is None:
            assert found is not None  # `following` makes one
            return found
        metadata = injection.metadata(certificates.SECRET_NAME) | {"namespace": self._namespace}
        if version:
            metadata["resourceVersion"] = version
        body = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": metadata,
            "data": certificates.secret(stored),
        }
        await self._apply(path, body)
        log.info(Event.CERTIFICATE_RENEWED, expires=stored.serving.expires.isoformat())
        return stored

    async def _apply_objects(self, found: Certificates) -> None:
        content = await self._api.request("GET", _GROUP)
        served = {one.name for one in msgspec.json.decode(content, type=_ResourceList).resources}
        has_policies = "mutatingadmissionpolicies" in served
        content = await self._api.request("GET", _ROLE_PATH)
        owner = msgspec.json.decode(content, type=_Owner).metadata.uid
        bundle = base64.b64encode(found.trusted).decode()
        for one in desired(self._namespace, bundle, has_policies=has_policies):
            one["metadata"]["ownerReferences"] = [
                {
                    "apiVersion": "rbac.authorization.k8s.io/v1",
                    "kind": "ClusterRole",
                    "name": "podgate-controller",
                    "uid": owner,
                }
            ]
            await self._apply(f"{_GROUP}/{_PLURALS[one['kind']]}/{one['metadata']['name']}", one)
        if has_policies:
            await self._delete(f"{_GROUP}/mutatingwebhookconfigurations/{injection.NAME}")

    async def _apply(self, path: str, body: Json) -> None:
        await self._api.request("PATCH", path, query=_MANAGER, body=body, content_type=APPLY)

    async def _delete(self, path: str) -> None:
        try:
            await self._api.request("DELETE", path)
        except ApiError as error:
            if error.code != 404:
                raise


def desired(namespace: str, bundle: str, *, has_policies: bool) -> list[Json]:
    """All admission objects. bundle: the caBundle; has_policies: whether the API server has
    MutatingAdmissionPolicies, which need no webhook."""

    def client(path: str) -> Json:
        service = {"name": SERVICE_NAME, "namespace": namespace, "path": path, "port": WEBHOOK_PORT}
        return {"service": service, "caBundle": bundle}

    found = [_validation(namespace, client(review.PROBE_SPEC_PATH))]
    if has_policies:
        for gate in injection.VALUES:
            found += injection.policy(gate, namespace)
    else:
        paths = {gate: client(path) for gate, path in review.INJECT_PATHS.items()}
        found.append(injection.webhook(namespace, paths))
    return found


def _validation(namespace: str, client_config: Json) -> Json:
    """The ValidatingWebhookConfiguration of the annotation `podgate.io/probe-spec`."""
    return {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingWebhookConfiguration",
        "metadata": injection.metadata("podgate-probe-spec"),
        "webhooks": [
            {
                "name": f"probe-spec.{DOMAIN}",
                "admissionReviewVersions": ["v1"],
                "clientConfig": client_config,
                # The agent reports what was not rejected here.
                "failurePolicy": "Ignore",
                "timeoutSeconds": 3,
                "sideEffects": "None",
                "namespaceSelector": {
                    "matchExpressions": [
                        {
                            "key": "kubernetes.io/metadata.name",
                            "operator": "NotIn",
                            "values": [namespace],
                        }
                    ]
                },
                "rules": [
                    {
                        "apiGroups": [""],
                        "apiVersions": ["v1"],
                        "operations": ["CREATE"],
                        "resources": ["pods"],
                        "scope": "Namespaced",
                    }
                ],
                "matchConditions": [
                    {
                        "name": "has-probe-spec",
                        "expression": "has(object.metadata.annotations) && "
                        f"'{probespec.ANNOTATION}' in object.metadata.annotations",
                    }
                ],
            }
        ],
    }


async def read_secret(api: ApiClient, namespace: str) -> tuple[Certificates | None, str]:
    """The Secret's usable content, and its resource version. Raises `ApiError`."""
    try:
        content = await api.request("GET", secret_path(namespace))
    except ApiError as error:
        if error.code == 404:
            return None, ""
        raise
    version = json.loads(content)["metadata"]["resourceVersion"]
    return certificates.read(content), version


def secret_path(namespace: str) -> str:
    return f"/api/v1/namespaces/{namespace}/secrets/{certificates.SECRET_NAME}"


def service_names(namespace: str) -> list[str]:
    """DNS names of the service; the API server uses the first one."""
    service = f"{SERVICE_NAME}.{namespace}"
    return [f"{service}.svc", service, f"{service}.svc.cluster.local"]
