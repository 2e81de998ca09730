"""Responses of an API server with any content: read, or one error of the client's."""

import asyncio
import contextlib
import json
from typing import Any

import msgspec
import pytest
from aiohttp import web
from hypothesis import example, given
from hypothesis import strategies as st

from agent.kube import pod_reading, responses
from agent.kube.client import ApiClient, ApiError
from agent.kube.kubelet_version import KubeletVersion
from agent.kube.objects import ApiPod, ApiStatus, MetadataOnly
from agent.kube.token_reviews import Access, TokenReviews
from agent.pods.pod_modes import PodModes
from bpf.verdicts import Mode
from tests.agent.kube.apiserver import ApiServer

DEEP = b'{"metadata":{"name":"a"},"status":' + b"[" * 100_000
NOT_UTF8 = b'{"metadata":{"name":"\xff"},"status":{}}'
ODD = [b"", b"\xff", b"null", b"[]", b'{"items":null}', b'{"status":null}', DEEP, NOT_UTF8]


@given(content=st.binary(max_size=100))
@example(content=DEEP)
@example(content=NOT_UTF8)
def test_no_bytes_end_a_reader(content: bytes) -> None:
    for kind in (responses.WatchEvent, responses.ObjectList, ApiPod, ApiStatus, MetadataOnly):
        with contextlib.suppress(msgspec.DecodeError):
            responses.decode(content, kind)
    responses.is_json(content)
    responses.decode_partial(content)
    responses.status(msgspec.Raw(content))


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(
    labels=st.dictionaries(st.text() | st.just("podgate.io/mode"), st.text(), max_size=2),
    spec=st.dictionaries(
        st.sampled_from(["ports", "readinessProbe", "livenessProbe", "lifecycle", "name"]), JSON
    ),
)
def test_no_pod_ends_its_reader(labels: dict[str, str], spec: dict[str, Any]) -> None:
    made = {
        "metadata": {"name": "a", "labels": labels, "annotations": {"podgate.io/probes": "agent"}},
        "spec": {"containers": [spec]},
    }
    pod = responses.decode(json.dumps(made).encode(), ApiPod)
    pod_reading.read(pod, PodModes(Mode.AUDIT, Mode.STRICT))


@pytest.mark.parametrize("content", ODD)
async def test_error_with_any_body_is_an_error_of_the_client(
    server: ApiServer, api: ApiClient, content: bytes
) -> None:
    async def respond(request: web.Request) -> web.StreamResponse:
        return web.Response(status=500, body=content)

    server.faults.append(respond)
    with pytest.raises(ApiError) as caught:
        await api.request("GET", "/a")
    assert caught.value.code == 500


@pytest.mark.parametrize("content", ODD)
async def test_review_with_any_answer_allows_nothing(
    server: ApiServer, api: ApiClient, content: bytes
) -> None:
    async def respond(request: web.Request) -> web.StreamResponse:
        return web.Response(body=content)

    server.faults.append(respond)
    reviews = TokenReviews(api, path="/metrics")
    assert await reviews.access("token", "198.18.0.1") is not Access.ALLOWED


@pytest.mark.parametrize("content", ODD)
async def test_list_of_nodes_with_any_content_ends_no_reader(
    server: ApiServer, api: ApiClient, content: bytes
) -> None:
    async def respond(request: web.Request) -> web.StreamResponse:
        return web.Response(body=content)

    server.faults.append(respond)
    version = KubeletVersion(api, "node1", needed=asyncio.Event(), publish=lambda _: None)
    with contextlib.suppress(msgspec.DecodeError):
        await version._read()
