"""Who may read an agent's answers: the API server authenticates a client's token and authorizes it.

As kube-rbac-proxy and the API server's own delegated authorization do (k8s.io/apiserver,
pkg/authentication/request/bearertoken and pkg/authorization/authorizerfactory): a TokenReview, then
a SubjectAccessReview for the verb get on a non-resource URL, or on the pods of one namespace.

Each unknown token causes requests to the API server, so these are limited: an answer is used
again for a time, and tokens without an answer share a budget of each address and one of all. A
token that was accepted within the last hour has a budget that others cannot use up.
"""

import asyncio
import collections
import dataclasses
import enum
import hashlib
import re

import msgspec

from agent import backoff
from agent.kube import responses
from agent.kube.client import ApiClient, ApiError

_TOKEN_REVIEWS = "/apis/authentication.k8s.io/v1/tokenreviews"  # noqa: S105  a path
_ACCESS_REVIEWS = "/apis/authorization.k8s.io/v1/subjectaccessreviews"

# RFC 6750 b64token; service account tokens are 1 KiB, those of OIDC up to several.
_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]{1,16384}=*", re.ASCII)

# A scrape comes every 15 to 60 s, and a withdrawn right should count soon.
_ACCEPTED_SECONDS = 60.0
_REJECTED_SECONDS = 30.0
# Metrics are needed most while the API server does not respond.
_UNVERIFIED_SECONDS = 600.0
# kubelets renew a pod's token after 48 minutes of its hour.
_REMEMBERED_SECONDS = 3600.0
_REVIEW_SECONDS = 5.0
_MAX_REMEMBERED = 256
_MAX_ADDRESSES = 1024

_PER_ADDRESS_PER_SECOND, _PER_ADDRESS_BURST = 0.2, 5
_UNKNOWN_PER_SECOND, _UNKNOWN_BURST = 2.0, 20
_ACCEPTED_PER_SECOND, _ACCEPTED_BURST = 2.0, 20


class Access(enum.Enum):
    """The answer for one token."""

    ALLOWED = enum.auto()
    UNAUTHENTICATED = enum.auto()
    FORBIDDEN = enum.auto()
    LIMITED = enum.auto()
    """Not decided: too many tokens without an answer."""
    UNAVAILABLE = enum.auto()
    """Not decided: the API server gives no answer."""


class _User(msgspec.Struct, frozen=True):
    """authentication.k8s.io/v1 UserInfo."""

    username: str = ""
    uid: str = ""
    groups: tuple[str, ...] = ()
    extra: dict[str, tuple[str, ...]] = {}


class _TokenReviewStatus(msgspec.Struct, frozen=True):
    authenticated: bool = False
    user: _User = _User()
    audiences: tuple[str, ...] = ()


class _TokenReview(msgspec.Struct, frozen=True):
    status: _TokenReviewStatus = _TokenReviewStatus()


class _AccessReviewStatus(msgspec.Struct, frozen=True):
    allowed: bool = False
    denied: bool = False


class _AccessReview(msgspec.Struct, frozen=True):
    status: _AccessReviewStatus = _AccessReviewStatus()


@dataclasses.dataclass(frozen=True, slots=True)
class _Answer:
    """access: the API server's; at: when, by the event loop's clock."""

    access: Access
    at: float


class TokenReviews:
    """Answers for tokens, with a memory. For the event loop."""

    def __init__(
        self, api: ApiClient, *, path: str, audience: str = "", is_proxied: bool = False
    ) -> None:
        """
        :param path: of the non-resource URL, such as "/metrics".
        :param audience: that tokens must have been made for; empty: the API server's.
        :param is_proxied: whether clients share the API server's address, so that only the budget
            of all counts.
        """
        self._api = api
        self._path = path
        self._audience = audience
        self._is_proxied = is_proxied
        # By the token's hash: no token is kept.
        self._answers: collections.OrderedDict[bytes, _Answer] = collections.OrderedDict()
        self._running: dict[bytes, asyncio.Task[Access]] = {}
        self._addresses: collections.OrderedDict[str, backoff.Bucket] = collections.OrderedDict()
        self._unknown = backoff.Bucket(per_second=_UNKNOWN_PER_SECOND, burst=_UNKNOWN_BURST)
        self._accepted = backoff.Bucket(per_second=_ACCEPTED_PER_SECOND, burst=_ACCEPTED_BURST)

    async def access(self, token: str, address: str, *, namespace: str = "") -> Access:
        """Whether the client with this bearer token may get the path.

        address: the client's IP; namespace: whose pods it may get is enough, if one is given.
        """
        if not _TOKEN.fullmatch(token):
            return Access.UNAUTHENTICATED
        # No token has a space.
        key = hashlib.sha256(f"{token} {namespace}".encode()).digest()
        answer = self._answers.get(key)
        age = asyncio.get_running_loop().time() - answer.at if answer else 0.0
        if answer and age < _lifetime(answer):
            return answer.access
        running = self._running.get(key)
        if running is None:
            was_accepted = (
                answer is not None and answer.access is Access.ALLOWED and age < _REMEMBERED_SECONDS
            )
            if not self._has_budget(address, was_accepted=was_accepted):
                return Access.LIMITED
            running = asyncio.create_task(self._review(key, token, namespace), name="token review")
            self._running[key] = running
            running.add_done_callback(lambda _: self._running.pop(key, None))
        # A client that disconnects does not end the review for the others.
        found = await asyncio.shield(running)
        if found is Access.UNAVAILABLE and answer and answer.access is Access.ALLOWED:
            return Access.ALLOWED if age < _UNVERIFIED_SECONDS else found
        return found

    def _has_budget(self, address: str, *, was_accepted: bool) -> bool:
        if was_accepted:
            return _take(self._accepted)
        if self._is_proxied:
            return _take(self._unknown)
        bucket = self._addresses.get(address)
        if bucket is None:
            bucket = backoff.Bucket(per_second=_PER_ADDRESS_PER_SECOND, burst=_PER_ADDRESS_BURST)
            self._addresses[address] = bucket
        self._addresses.move_to_end(address)
        while len(self._addresses) > _MAX_ADDRESSES:
            self._addresses.popitem(last=False)
        return _take(bucket) and _take(self._unknown)

    async def _review(self, key: bytes, token: str, namespace: str) -> Access:
        try:
            access = await self._request(token, namespace)
        except (ApiError, msgspec.DecodeError):
            return Access.UNAVAILABLE
        self._answers[key] = _Answer(access, asyncio.get_running_loop().time())
        self._answers.move_to_end(key)
        self._forget()
        return access

    def _forget(self) -> None:
        """The oldest rejected token first: a flood of others does not displace accepted ones."""
        while len(self._answers) > _MAX_REMEMBERED:
            rejected = (
                key for key, one in self._answers.items() if one.access is not Access.ALLOWED
            )
            del self._answers[next(rejected, next(iter(self._answers)))]

    async def _request(self, token: str, namespace: str) -> Access:
        """Raises `ApiError` or `msgspec.DecodeError`."""
        audiences = {"audiences": [self._audience]} if self._audience else {}
        content = await self._create(_TOKEN_REVIEWS, "TokenReview", {"token": token, **audiences})
        found = responses.decode(content, _TokenReview).status
        # An authenticator that knows no audiences returns none (authentication.k8s.io/v1).
        if not found.authenticated or (self._audience and self._audience not in found.audiences):
            return Access.UNAUTHENTICATED
        path = {"nonResourceAttributes": {"path": self._path, "verb": "get"}}
        if await self._is_allowed(found.user, path):
            return Access.ALLOWED
        pods = {"namespace": namespace, "resource": "pods", "verb": "get"}
        if namespace and await self._is_allowed(found.user, {"resourceAttributes": pods}):
            return Access.ALLOWED
        return Access.FORBIDDEN

    async def _is_allowed(self, user: _User, attributes: dict[str, dict[str, str]]) -> bool:
        spec: dict[str, object] = {
            "user": user.username,
            "uid": user.uid,
            "groups": list(user.groups),
            "extra": {name: list(values) for name, values in user.extra.items()},
            **attributes,
        }
        content = await self._create(_ACCESS_REVIEWS, "SubjectAccessReview", spec)
        status = responses.decode(content, _AccessReview).status
        return status.allowed and not status.denied

    async def _create(self, path: str, kind: str, spec: dict[str, object]) -> bytes:
        group = path.split("/")[2]
        body = {"apiVersion": f"{group}/v1", "kind": kind, "spec": spec}
        return await self._api.request("POST", path, body=body, timeout_seconds=_REVIEW_SECONDS)


def _lifetime(answer: _Answer) -> float:
    return _ACCEPTED_SECONDS if answer.access is Access.ALLOWED else _REJECTED_SECONDS


def _take(bucket: backoff.Bucket) -> bool:
    if bucket.seconds_until_next() > 0:
        return False
    bucket.take()
    return True
