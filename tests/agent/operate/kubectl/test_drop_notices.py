"""Drops of a namespace by the Events of its pods."""

import json
from typing import Any

import pytest
import yaml

from agent import labels
from agent.operate.kubectl import drop_notices
from agent.operate.kubectl.cluster import Cluster
from tests.agent.operate.kubectl.standin import KubectlStandin

MISSING = (
    "The agents give you no answer: it is forbidden. Events of namespace shop have only some drops "
    "of the last hour; none of them does not mean that nothing was dropped."
)


def event(pod: str | None, at: str, reason: str = labels.TRAFFIC_DROPPED) -> dict[str, Any]:
    return {
        "metadata": {"creationTimestamp": at},
        "reason": reason,
        "message": "dropped\x1b",
        "involvedObject": {"name": pod} if pod else None,
    }


@pytest.fixture
def events(kubectl: KubectlStandin) -> KubectlStandin:
    items = [
        event("old", "2026-11-22T10:00:00Z"),
        event("other", "2026-11-22T12:00:00Z", "Unhealthy"),
        event("new", "2026-11-22T11:00:00.123456Z", labels.TRAFFIC_WOULD_DROP),
        event(None, "2026-11-22T09:00:00Z"),
    ]
    kubectl.respond("get", "events", "--namespace=shop", output={"items": items})
    return kubectl


@pytest.mark.parametrize("form", ["table", "wide"])
def test_newest_notice_is_the_first(
    events: KubectlStandin, cluster: Cluster, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    assert drop_notices.run(cluster, "shop", "it is forbidden", form=form) == 3
    captured = capsys.readouterr()
    assert captured.out.splitlines() == [
        r"2026-11-22T11:00:00Z  shop/new: dropped\x1b",
        r"2026-11-22T10:00:00Z  shop/old: dropped\x1b",
        r"2026-11-22T09:00:00Z  shop/: dropped\x1b",
    ]
    assert captured.err == f"{MISSING}\n"


@pytest.mark.parametrize("form", ["json", "yaml"])
def test_notices_are_a_document_with_what_is_missing(
    events: KubectlStandin, cluster: Cluster, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    assert drop_notices.run(cluster, "shop", "it is forbidden", form=form) == 3
    text = capsys.readouterr().out
    found = json.loads(text) if form == "json" else yaml.safe_load(text)
    assert found["missing"] == MISSING
    assert found["events"][0] == {
        **{"pod": "shop/new", "reason": labels.TRAFFIC_WOULD_DROP, "text": "dropped\x1b"},
        "at": "2026-11-22T11:00:00.123456Z",
    }
    assert [one["pod"] for one in found["events"]] == ["shop/new", "shop/old", "shop/"]
