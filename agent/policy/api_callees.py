"""What the API server calls in pods: services of webhooks, conversions and aggregated APIs.

Webhook configurations, CustomResourceDefinitions and APIServices name services; these select pods
and name their ports. All are watched, but only on nodes that run an API server: a few megabytes of
objects that no other node needs. What was last read is saved, since an API server that starts calls
its webhooks before the watches return.
"""

import asyncio
import pathlib
import random
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from agent import backoff, state_files, tasks
from agent.kube.client import ApiClient
from agent.kube.objects import ObjectMetadata
from agent.kube.watcher import Query, Watcher
from agent.logs import Event

_ADMISSION = "/apis/admissionregistration.k8s.io/v1"


class ServiceReference(msgspec.Struct, frozen=True):
    """A reference to a service; port: the service's, with the API's default."""

    namespace: str
    name: str
    port: int | None = None


class ClientConfig(msgspec.Struct, frozen=True):
    """webhook.ClientConfig: without a service it has a URL, which may lead anywhere."""

    service: ServiceReference | None = None


class Webhook(msgspec.Struct, frozen=True, rename="camel"):
    client_config: ClientConfig | None = None


class WebhookConfiguration(msgspec.Struct, frozen=True):
    """ValidatingWebhookConfiguration or MutatingWebhookConfiguration."""

    metadata: ObjectMetadata
    webhooks: tuple[Webhook, ...] | None = None


class Conversion(msgspec.Struct, frozen=True):
    webhook: Webhook | None = None


class DefinitionSpec(msgspec.Struct, frozen=True):
    conversion: Conversion | None = None


class Definition(msgspec.Struct, frozen=True):
    """CustomResourceDefinition."""

    metadata: ObjectMetadata
    spec: DefinitionSpec


class ApiServiceSpec(msgspec.Struct, frozen=True):
    service: ServiceReference | None = None


class ApiService(msgspec.Struct, frozen=True):
    """APIService."""

    metadata: ObjectMetadata
    spec: ApiServiceSpec


class ServicePort(msgspec.Struct, frozen=True, rename="camel"):
    port: int
    target_port: int | str | None = None
    protocol: str = "TCP"


class ServiceSpec(msgspec.Struct, frozen=True):
    selector: dict[str, str] | None = None
    ports: tuple[ServicePort, ...] | None = None


class Service(msgspec.Struct, frozen=True):
    metadata: ObjectMetadata
    spec: ServiceSpec


class EndpointPort(msgspec.Struct, frozen=True):
    port: int | None = None


class Endpoint(msgspec.Struct, frozen=True):
    addresses: tuple[str, ...] = ()


class EndpointSlice(msgspec.Struct, frozen=True):
    metadata: ObjectMetadata
    endpoints: tuple[Endpoint, ...] | None = None
    ports: tuple[EndpointPort, ...] | None = None


class Callee(msgspec.Struct, frozen=True, order=True):
    """One port of one service's pods. selector: their labels, sorted; port: a number or a name."""

    namespace: str
    service: str
    selector: tuple[tuple[str, str], ...]
    port: int | str


class CalleeSnapshot(msgspec.Struct, frozen=True):
    """What is known of API servers and their callees. endpoints: of all API servers."""

    endpoints: tuple[tuple[str, int], ...] = ()
    callees: tuple[Callee, ...] = ()
    without_selector: tuple[str, ...] = ()
    """Services whose pods cannot be derived: "namespace/name"."""


class ApiCallees:
    """Follows them. `snapshot` may be read by threads."""

    def __init__(
        self, api: ApiClient, *, state: pathlib.Path, jitter: backoff.Jitter = random.random
    ) -> None:
        """state: the file that stores the snapshot."""
        self.snapshot = CalleeSnapshot()
        self.changed = asyncio.Event()
        self._state = state
        self._is_needed = False
        self._needed = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._is_marked = False

        def watch(
            name: str, path: str, kind: type, field_selector: str = "", *, absent: bool = False
        ) -> Watcher[Any]:
            query: Query[Any] = Query(name, path, kind, field_selector, may_be_absent=absent)
            return Watcher(api, query, on_change=lambda *_: self._mark(), jitter=jitter)

        self._servers = watch(
            "endpoints of API servers",
            "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices",
            EndpointSlice,
            "metadata.name=kubernetes",
        )
        names = ("validatingwebhookconfigurations", "mutatingwebhookconfigurations")
        self._webhooks = [
            watch(name, f"{_ADMISSION}/{name}", WebhookConfiguration) for name in names
        ]
        self._definitions = watch(
            "customresourcedefinitions",
            "/apis/apiextensions.k8s.io/v1/customresourcedefinitions",
            Definition,
        )
        self._api_services = watch(
            "apiservices", "/apis/apiregistration.k8s.io/v1/apiservices", ApiService, absent=True
        )
        self._services = watch("services", "/api/v1/services", Service)

    @property
    def watchers(self) -> list[Watcher[Any]]:
        """All of them, also those that do not run yet."""
        return [self._servers, *self._of_callees]

    @property
    def is_listed(self) -> bool:
        """Whether all that is needed on this node has been listed once."""
        needed = self.watchers if self._is_needed else [self._servers]
        return all(watcher.answered.is_set() for watcher in needed)

    def restore(self) -> None:
        """Read what the previous agent saved."""
        found = state_files.read(
            self._state, CalleeSnapshot, failure=Event.SAVED_POLICIES_UNREADABLE
        )
        self.snapshot = found or CalleeSnapshot()

    def need(self) -> None:
        """This node runs an API server: follow its callees from now on. For a thread."""
        if not self._is_needed:
            self._is_needed = True
            self._loop.call_soon_threadsafe(self._needed.set)

    async def run(self) -> None:
        """Follow until cancelled."""
        async with asyncio.TaskGroup() as group:
            tasks.start(group, f"watch of {self._servers.query.name}", self._servers.run)
            await self._needed.wait()
            for watcher in self._of_callees:
                tasks.start(group, f"watch of {watcher.query.name}", watcher.run)

    @property
    def _of_callees(self) -> list[Watcher[Any]]:
        return [*self._webhooks, self._definitions, self._api_services, self._services]

    def _mark(self) -> None:
        """Changes that arrive together are read together."""
        if not self._is_marked:
            self._is_marked = True
            asyncio.get_running_loop().call_soon(self._read)

    def _read(self) -> None:
        self._is_marked = False
        callees, unknown = self.snapshot.callees, self.snapshot.without_selector
        if all(watcher.synced.is_set() for watcher in self._of_callees if not watcher.is_absent):
            callees, unknown = self._callees()
        snapshot = CalleeSnapshot(_endpoints(self._servers.objects.values()), callees, unknown)
        if snapshot != self.snapshot:
            self.snapshot = snapshot
            self.changed.set()

    def save(self, snapshot: CalleeSnapshot) -> None:
        """Blocks."""
        state_files.write(self._state, snapshot, failure=Event.POLICIES_NOT_SAVED)

    def _callees(self) -> tuple[tuple[Callee, ...], tuple[str, ...]]:
        found: set[Callee] = set()
        unknown: set[str] = set()
        for reference in self._references():
            service = self._services.objects.get((reference.namespace, reference.name))
            if service is None:
                continue
            if not service.spec.selector:
                unknown.add(service.metadata.full_name)
                continue
            # kubernetes/pkg/apis/admissionregistration/v1/defaults.go, apiregistration/v1.
            number = 443 if reference.port is None else reference.port
            for port in service.spec.ports or ():
                if port.port == number and port.protocol == "TCP":
                    target = port.port if port.target_port is None else port.target_port
                    found.add(
                        Callee(
                            reference.namespace,
                            reference.name,
                            tuple(sorted(service.spec.selector.items())),
                            target,
                        )
                    )
        return tuple(sorted(found, key=repr)), tuple(sorted(unknown))

    def _references(self) -> Iterator[ServiceReference]:
        """All services that the API server may call."""
        for watcher in self._webhooks:
            for configuration in watcher.objects.values():
                for webhook in configuration.webhooks or ():
                    yield from _service(webhook)
        for definition in self._definitions.objects.values():
            if conversion := definition.spec.conversion:
                yield from _service(conversion.webhook)
        for api_service in self._api_services.objects.values():
            if api_service.spec.service:
                yield api_service.spec.service


def _service(webhook: Webhook | None) -> Iterator[ServiceReference]:
    if webhook and webhook.client_config and webhook.client_config.service:
        yield webhook.client_config.service


def _endpoints(slices: Iterable[EndpointSlice]) -> tuple[tuple[str, int], ...]:
    """The addresses and ports of API servers (pkg/controlplane/reconcilers: one slice for each
    family)."""
    return tuple(
        sorted(
            (address, port.port)
            for found in slices
            for port in found.ports or ()
            if port.port is not None
            for endpoint in found.endpoints or ()
            for address in endpoint.addresses
        )
    )
