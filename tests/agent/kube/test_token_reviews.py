"""Who may read metrics: answers of the API server, for how long they count, and their price."""

import asyncio
import json
import pathlib
from typing import Any

import pytest
from aiohttp import web

from agent.kube import token_reviews
from agent.kube.client import ApiClient
from agent.kube.token_reviews import Access, TokenReviews
from tests.agent.kube.apiserver import ApiServer

pytestmark = pytest.mark.looptime

# Of a real API server: tests/cluster/test_metrics_access.py compares and records them.
RECORDED = json.loads(
    (pathlib.Path(__file__).parent / "recorded" / "reviews.json").read_text(encoding="utf-8")
)
TOKEN_REVIEWS = "/apis/authentication.k8s.io/v1/tokenreviews"
ACCESS_REVIEWS = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
ADDRESS = "198.18.0.7"


class Cluster:
    """The API server's answers by token: of an allowed account, a forbidden one, and others."""

    def __init__(self, server: ApiServer) -> None:
        self.server = server
        self.is_away = False
        self.accounts = {"good": "allowed", "other": "forbidden"}
        server.faults.append(self._answer)

    async def _answer(self, request: web.Request) -> web.Response | None:
        if self.is_away:
            return web.json_response({"kind": "Status", "message": "etcd is away"}, status=500)
        if request.path not in (TOKEN_REVIEWS, ACCESS_REVIEWS):
            return None
        spec = self.server.received[-1].body["spec"]
        if request.path == TOKEN_REVIEWS:
            account = self.accounts.get(spec["token"], "invalid")
            return web.json_response(RECORDED[account]["tokenReview"], status=201)
        names = {
            RECORDED[name]["tokenReview"]["status"]["user"]["username"]: name
            for name in ("allowed", "forbidden")
        }
        answer = RECORDED[names[spec["user"]]]["accessReview"]
        return web.json_response(answer, status=201)

    @property
    def requests(self) -> int:
        """Requests for reviews so far."""
        return sum(1 for one in self.server.received if one.method == "POST")


@pytest.fixture
def cluster(server: ApiServer) -> Cluster:
    return Cluster(server)


@pytest.fixture
def reviews(api: ApiClient) -> TokenReviews:
    return TokenReviews(api, path="/metrics")


async def test_account_with_the_right_is_allowed(cluster: Cluster, reviews: TokenReviews) -> None:
    assert await reviews.access("good", ADDRESS) is Access.ALLOWED
    [token], [access] = (
        cluster.server.of(path, method="POST") for path in (TOKEN_REVIEWS, ACCESS_REVIEWS)
    )
    assert token.body == {
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenReview",
        "spec": {"token": "good"},
    }
    user = RECORDED["allowed"]["tokenReview"]["status"]["user"]
    assert access.body["spec"] == {
        "user": user["username"],
        "uid": user["uid"],
        "groups": user["groups"],
        "extra": user["extra"],
        "nonResourceAttributes": {"path": "/metrics", "verb": "get"},
    }


async def test_account_without_the_right_is_forbidden(
    cluster: Cluster, reviews: TokenReviews
) -> None:
    assert await reviews.access("other", ADDRESS) is Access.FORBIDDEN


async def test_token_that_is_none_of_the_cluster_has_no_access_review(
    cluster: Cluster, reviews: TokenReviews
) -> None:
    assert await reviews.access("stolen", ADDRESS) is Access.UNAUTHENTICATED
    assert cluster.requests == 1


@pytest.mark.parametrize("token", ["", "two words", "x" * 20_000, "naïve", "a\x00b", "a\r\nb: c"])
async def test_text_that_can_be_no_token_costs_no_request(
    cluster: Cluster, reviews: TokenReviews, token: str
) -> None:
    assert await reviews.access(token, ADDRESS) is Access.UNAUTHENTICATED
    assert cluster.requests == 0


async def test_answer_is_used_again_for_a_minute_and_then_requested_again(
    cluster: Cluster, reviews: TokenReviews
) -> None:
    await asyncio.sleep(100)
    for _ in range(59):
        assert await reviews.access("good", ADDRESS) is Access.ALLOWED
        await asyncio.sleep(1)
    assert cluster.requests == 2
    del cluster.accounts["good"]
    await asyncio.sleep(2)
    assert await reviews.access("good", ADDRESS) is Access.UNAUTHENTICATED


async def test_clients_with_one_token_share_a_request(
    cluster: Cluster, reviews: TokenReviews
) -> None:
    found = await asyncio.gather(*(reviews.access("good", ADDRESS) for _ in range(50)))
    assert set(found) == {Access.ALLOWED}
    assert cluster.requests == 2


async def test_flood_of_tokens_is_limited_for_each_address_and_for_all(
    cluster: Cluster, reviews: TokenReviews
) -> None:
    for second in range(60):
        found = [await reviews.access(f"{second}-{i}", ADDRESS) for i in range(20)]
    assert found[-1] is Access.LIMITED
    assert cluster.requests <= 5 + 60 * 0.2 + 1
    before = cluster.requests
    for second in range(60):
        for i in range(20):
            await reviews.access(f"{second}-{i}-more", f"198.18.{second}.{i}")
        await asyncio.sleep(1)
    assert cluster.requests - before <= 20 + 2 * 60 + 1


@pytest.mark.parametrize("others", [1, 2])
async def test_limit_of_an_address_holds_among_those_of_many_others(
    cluster: Cluster,
    reviews: TokenReviews,
    monkeypatch: pytest.MonkeyPatch,
    others: int,
) -> None:
    """The last that sent a token are remembered."""
    monkeypatch.setattr(token_reviews, "_MAX_ADDRESSES", 2)
    for number in range(others):
        await reviews.access(f"first-{number}", f"198.18.1.{number}")
    for number in range(6):
        last = await reviews.access(f"bad-{number}", ADDRESS)
    assert last is Access.LIMITED
    await asyncio.sleep(2)
    for number in range(3):
        await reviews.access(f"other-{number}", f"198.18.2.{number}")
        assert await reviews.access(f"more-{number}", ADDRESS) is Access.LIMITED


async def test_tokens_that_were_accepted_last_are_remembered(
    cluster: Cluster, reviews: TokenReviews, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_reviews, "_MAX_REMEMBERED", 2)
    cluster.accounts |= dict.fromkeys(("a", "b", "c"), "allowed")
    for name in ("a", "b", "a", "c"):
        assert await reviews.access(name, ADDRESS) is Access.ALLOWED
        await asyncio.sleep(61)
    cluster.is_away = True
    found = {name: await reviews.access(name, "198.18.0.9") for name in ("a", "b", "c")}
    assert found == {"a": Access.ALLOWED, "b": Access.UNAVAILABLE, "c": Access.ALLOWED}


async def test_rejected_tokens_are_forgotten_before_accepted_ones_and_the_oldest_first(
    cluster: Cluster, reviews: TokenReviews, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_reviews, "_MAX_REMEMBERED", 2)
    for name in ("good", "bad-1", "bad-2"):
        await reviews.access(name, ADDRESS)
    requests = cluster.requests
    assert await reviews.access("bad-2", ADDRESS) is Access.UNAUTHENTICATED
    assert cluster.requests == requests
    assert await reviews.access("bad-1", ADDRESS) is Access.UNAUTHENTICATED
    assert cluster.requests == requests + 1
    cluster.is_away = True
    await asyncio.sleep(61)
    assert await reviews.access("good", ADDRESS) is Access.ALLOWED


async def test_flood_does_not_lock_out_who_was_accepted(
    cluster: Cluster, reviews: TokenReviews
) -> None:
    assert await reviews.access("good", ADDRESS) is Access.ALLOWED
    for i in range(600):
        await reviews.access(f"bad-{i}", f"198.18.{i % 200}.1")
        await asyncio.sleep(0.1)
        if i % 100 == 0:
            assert await reviews.access("good", ADDRESS) is Access.ALLOWED
    assert len(reviews._answers) <= 256
    assert await reviews.access("good", ADDRESS) is Access.ALLOWED


async def test_without_the_api_server_no_new_token_is_accepted(
    cluster: Cluster, reviews: TokenReviews
) -> None:
    cluster.is_away = True
    assert await reviews.access("good", ADDRESS) is Access.UNAVAILABLE
    cluster.is_away = False
    assert await reviews.access("good", ADDRESS) is Access.ALLOWED


async def test_without_the_api_server_an_accepted_token_counts_for_ten_minutes(
    cluster: Cluster, reviews: TokenReviews
) -> None:
    assert await reviews.access("good", ADDRESS) is Access.ALLOWED
    cluster.is_away = True
    await asyncio.sleep(590)
    assert await reviews.access("good", ADDRESS) is Access.ALLOWED
    await asyncio.sleep(20)
    assert await reviews.access("good", ADDRESS) is Access.UNAVAILABLE


async def test_answer_that_is_no_review_admits_no_client(
    cluster: Cluster, reviews: TokenReviews
) -> None:
    async def broken(_: web.Request) -> web.Response | None:
        answer: Any = {"status": {"authenticated": "yes"}}
        return web.json_response(answer, status=201)

    cluster.server.faults.insert(0, broken)
    assert await reviews.access("good", ADDRESS) is Access.UNAVAILABLE


async def limited(reviews: TokenReviews, address: str, count: int, name: str) -> list[bool]:
    """Whether each of this number of new tokens is, which come at the same time."""
    tokens = [f"{name}-{number}" for number in range(count)]
    found = await asyncio.gather(*(reviews.access(token, address) for token in tokens))
    assert set(found) <= {Access.UNAUTHENTICATED, Access.LIMITED}
    return [one is Access.LIMITED for one in found]


async def test_address_has_one_new_token_in_five_seconds_after_the_first_five(
    cluster: Cluster, reviews: TokenReviews
) -> None:
    now = asyncio.get_running_loop().time
    started = now()
    assert await limited(reviews, ADDRESS, 7, "a") == [False] * 5 + [True] * 2
    await asyncio.sleep(started + 4.5 - now())
    assert await limited(reviews, ADDRESS, 1, "b") == [True]
    await asyncio.sleep(started + 5.5 - now())
    assert await limited(reviews, ADDRESS, 2, "c") == [False, True]
    assert await limited(reviews, "198.18.0.8", 1, "d") == [False]
    assert cluster.requests == 7


async def test_clients_behind_a_proxy_share_the_budget_of_all(
    cluster: Cluster, api: ApiClient
) -> None:
    now = asyncio.get_running_loop().time
    reviews = TokenReviews(api, path="/metrics", is_proxied=True)
    started = now()
    assert await limited(reviews, ADDRESS, 22, "a") == [False] * 20 + [True] * 2
    await asyncio.sleep(max(0.0, started + 60 - now()))
    assert await limited(reviews, "198.18.0.8", 21, "b") == [False] * 20 + [True]


async def test_rejected_token_is_not_requested_again_for_half_a_minute(
    cluster: Cluster, reviews: TokenReviews
) -> None:
    for _ in range(2):
        assert await reviews.access("late", ADDRESS) is Access.UNAUTHENTICATED
        cluster.accounts["late"] = "allowed"
        await asyncio.sleep(29)
    assert cluster.requests == 1
    await asyncio.sleep(1)
    assert await reviews.access("late", ADDRESS) is Access.ALLOWED


@pytest.mark.parametrize(
    ("audience", "audiences", "access"),
    [
        ("", [], Access.ALLOWED),
        ("", ["other"], Access.ALLOWED),
        ("podgate", ["other", "podgate"], Access.ALLOWED),
        ("podgate", ["other"], Access.UNAUTHENTICATED),
        # As of an authenticator that knows none.
        ("podgate", [], Access.UNAUTHENTICATED),
    ],
)
async def test_token_must_have_been_made_for_the_audience(
    cluster: Cluster, api: ApiClient, audience: str, audiences: list[str], access: Access
) -> None:
    async def answer(request: web.Request) -> web.Response | None:
        if request.path != TOKEN_REVIEWS:
            return None
        review = RECORDED["allowed"]["tokenReview"]
        status = {**review["status"], "audiences": audiences}
        return web.json_response({**review, "status": status}, status=201)

    cluster.server.faults.insert(0, answer)
    reviews = TokenReviews(api, path="/metrics", audience=audience)
    assert await reviews.access("good", ADDRESS) is access
    (request,) = cluster.server.of(TOKEN_REVIEWS, method="POST")
    assert request.body["spec"] == {"token": "good"} | (
        {"audiences": [audience]} if audience else {}
    )


@pytest.mark.parametrize(
    ("statuses", "access"),
    [
        ({"path": {"allowed": True}}, Access.ALLOWED),
        ({"path": {"allowed": True, "denied": True}}, Access.FORBIDDEN),
        ({"path": {"allowed": False}, "pods": {"allowed": True}}, Access.ALLOWED),
        ({"path": {"allowed": False}, "pods": {"allowed": False}}, Access.FORBIDDEN),
        ({"path": {}, "pods": {"allowed": True, "denied": True}}, Access.FORBIDDEN),
    ],
)
async def test_right_to_the_pods_of_a_namespace_is_enough(
    cluster: Cluster, reviews: TokenReviews, statuses: dict[str, Any], access: Access
) -> None:
    async def answer(request: web.Request) -> web.Response | None:
        if request.path != ACCESS_REVIEWS:
            return None
        is_of_path = "nonResourceAttributes" in cluster.server.received[-1].body["spec"]
        status = statuses.get("path" if is_of_path else "pods", {})
        return web.json_response({"status": status}, status=201)

    cluster.server.faults.insert(0, answer)
    assert await reviews.access("good", ADDRESS, namespace="shop") is access
    of_pods = [
        one.body["spec"]["resourceAttributes"]
        for one in cluster.server.of(ACCESS_REVIEWS, method="POST")
        if "resourceAttributes" in one.body["spec"]
    ]
    needs_pods = not (statuses["path"].get("allowed") and not statuses["path"].get("denied"))
    pods = {"namespace": "shop", "resource": "pods", "verb": "get"}
    assert of_pods == ([pods] if needs_pods else [])
    # What counts for one namespace does not for another, nor for all.
    statuses["pods"] = {"allowed": False}
    other = access if not needs_pods else Access.FORBIDDEN
    assert await reviews.access("good", ADDRESS, namespace="bank") is other
    requests = cluster.requests
    assert await reviews.access("good", ADDRESS) is other
    assert cluster.requests == requests + 2
    assert await reviews.access("good", ADDRESS, namespace="shop") is access
