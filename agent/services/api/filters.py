"""What a client requests: which services, and what of them. From the message, checked."""

import dataclasses
from collections.abc import Iterable, Mapping

from agent.errors import PodgateError
from agent.services.api import objects
from agent.services.client.services import TYPES
from agent.services.client.v1alpha1 import endpoints_pb2 as pb

ANY = "*"
"""As a service-proxy-name."""

# Each key of each service is compared with each pattern.
_MAX_PATTERNS = 32
_FAMILIES: dict[int, bool] = {pb.ADDRESS_FAMILY_IPV4: False, pb.ADDRESS_FAMILY_IPV6: True}


class FilterError(PodgateError):
    """A field of a request is invalid; the message is for the client."""


@dataclasses.dataclass(frozen=True, slots=True)
class MessageForm:
    """What is sent of each service."""

    families: frozenset[bool] = frozenset(_FAMILIES.values())
    """True: IPv6."""
    label_patterns: frozenset[str] = frozenset()
    annotation_patterns: frozenset[str] = frozenset()
    all_endpoints: bool = False
    endpoint_details: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class ServiceFilter:
    """Which services are sent, and in which form. The default is that of clients without one."""

    namespaces: frozenset[str] = frozenset()
    """Empty: all."""
    types: frozenset[int] = frozenset(TYPES.values()) - {pb.SERVICE_TYPE_EXTERNAL_NAME}
    proxy_name: str = ""
    """Empty: services without one; `ANY`: all."""
    form: MessageForm = MessageForm()

    def has_namespace(self, namespace: str) -> bool:
        return not self.namespaces or namespace in self.namespaces

    def selects(self, service: objects.ApiService) -> bool:
        """By everything but the namespace and families."""
        proxy_name = service.metadata.labels.get(objects.PROXY_NAME_LABEL, "")
        return TYPES.get(service.spec.type) in self.types and self.proxy_name in (proxy_name, ANY)


def read(request: pb.NextFilter) -> ServiceFilter:
    """The filter of a request; equal ones are the same filter. Raises `FilterError`."""
    families = _values("families", request.families, _FAMILIES)
    return ServiceFilter(
        namespaces=_names("namespaces", request.namespaces),
        types=_values("types", request.types, TYPES.values()) or ServiceFilter().types,
        proxy_name=request.service_proxy_name,
        form=MessageForm(
            families=frozenset(_FAMILIES[one] for one in families) or MessageForm().families,
            label_patterns=_patterns("label_patterns", request.label_patterns),
            annotation_patterns=_patterns("annotation_patterns", request.annotation_patterns),
            all_endpoints=request.all_endpoints,
            endpoint_details=request.endpoint_details,
        ),
    )


def chosen(found: Mapping[str, str], patterns: Iterable[str]) -> dict[str, str]:
    """The labels or annotations whose keys match a pattern."""
    return {
        key: value
        for key, value in found.items()
        if any(matches(key, pattern) for pattern in patterns)
    }


def matches(key: str, pattern: str) -> bool:
    """Whether `*` in the pattern can stand for parts of the key. Patterns are a client's: the time
    is linear for each part, unlike that of a regular expression."""
    first, *parts = pattern.split("*")
    if not parts:
        return key == pattern
    *middle, last = parts
    at, end = len(first), len(key) - len(last)
    if not (key.startswith(first) and key.endswith(last)):
        return False
    for part in middle:
        at = key.find(part, at, end) + len(part)
        if at < len(part):
            return False
    return at <= end


def _values(field: str, values: Iterable[int], accepted: Iterable[int]) -> frozenset[int]:
    usable = sorted(accepted)
    for value in values:
        if value not in usable:
            raise FilterError(f"{field} has {value}; its values are {usable}")
    return frozenset(values)


def _names(field: str, names: Iterable[str]) -> frozenset[str]:
    found = frozenset(names)
    if "" in found:
        raise FilterError(f"{field} has an empty text; leave it out to select all or nothing")
    return found


def _patterns(field: str, patterns: Iterable[str]) -> frozenset[str]:
    found = _names(field, patterns)
    if len(found) > _MAX_PATTERNS:
        raise FilterError(
            f"{field} has {len(found)} patterns, and {_MAX_PATTERNS} is the maximum; use * in them"
        )
    return found
