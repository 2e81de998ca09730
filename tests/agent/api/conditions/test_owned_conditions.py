"""Conditions of owners without sockets: limits, time-outs, sandboxes, and findings about them."""

import asyncio
from typing import Any

import grpc
import pytest
import structlog.testing

from agent.admin import finding_kinds as kinds
from agent.admin import findings
from agent.api.conditions import owner as owners
from agent.api.conditions.owned_conditions import OwnedConditions, Session
from agent.api.conditions.owners import FileOwners
from agent.api.conditions.validation import RejectedError
from agent.client.v1alpha1 import conditions_pb2 as pb
from agent.kube.objects import ApiPod, ApiPodStatus, ObjectMetadata, PodCondition, ReadinessGate
from agent.kube.objects import ApiPodSpec as PodSpec
from agent.kube.patches import SandboxStamp
from agent.logs import Event
from agent.pods.conditions import Conditions
from agent.pods.pod import Pod
from tests import polling
from tests.agent.api.conditions.node import BOOT, Life, Node, owner
from tests.agent.operate.page.reports import report as agent_report

pytestmark = pytest.mark.looptime

DOMAIN, HEALTHY = "gpu.example.com", "gpu.example.com/healthy"


class Held:
    """Conditions of one owner, of the pods `uid-web` and `uid-db`."""

    def __init__(self, **spec: Any) -> None:
        self.conditions = Conditions()
        self.pods = {
            f"uid-{name}": Pod(uid=f"uid-{name}", namespace="shop", name=name)
            for name in ("web", "db")
        }
        self.sandbox = "sandbox-1"
        self.owned = OwnedConditions(
            self.conditions,
            pod_of=self.pods.get,
            sandbox_of=lambda uid: self.sandbox,
            has_all_pods=lambda: True,
            boot=BOOT,
            on_change=self._save,
        )
        self.saves = 0
        self.set_owner(**spec)

    def set_owner(self, **spec: Any) -> None:
        self.owned.set_owners({DOMAIN: owners.read(owner(DOMAIN, {"user": 1}, **spec))})

    def report(self, session: Session, kind: str = HEALTHY, **fields: Any) -> str:
        given = {"pod_uid": "uid-web", "type": kind, "status": "True", "reason": "Fine"}
        return self.owned.report(session, pb.Condition(**given | fields))

    def has_saved(self) -> bool:
        """Whether something is to be saved since this was called last."""
        saves, self.saves = self.saves, 0
        return saves > 0

    def _save(self) -> None:
        self.saves += 1

    def shown(self, kind: str = HEALTHY) -> tuple[str, str] | None:
        found = self.conditions.get("uid-web", kind)
        return (found.status, found.reason) if found else None


@pytest.mark.parametrize(
    ("fields", "code", "sentence"),
    [
        ({"type": "healthy"}, "INVALID_ARGUMENT", "is not DOMAIN/NAME, such as gpu.example.com/"),
        ({"type": f"{DOMAIN}/-"}, "INVALID_ARGUMENT", "is not DOMAIN/NAME"),
        ({"type": "a.gpu.example.com/x"}, "PERMISSION_DENIED", "is not of the domain"),
        ({"type": "podgate.io/isolation-ready"}, "PERMISSION_DENIED", "is not of the domain"),
        ({"status": "true"}, "INVALID_ARGUMENT", "status 'true' is not True, False or Unknown"),
        ({"reason": ""}, "INVALID_ARGUMENT", "reason '' is not one word in CamelCase"),
        ({"reason": "Not fine"}, "INVALID_ARGUMENT", "is not one word"),
        ({"reason": "OwnerGone"}, "INVALID_ARGUMENT", "is podgate's own"),
        ({"message": "x" * 901}, "INVALID_ARGUMENT", "more than 900 characters"),
        ({"message": "a\nb"}, "INVALID_ARGUMENT", "not printable"),
        ({"pod_uid": "uid-gone"}, "NOT_FOUND", "this node has no pod of uid 'uid-gone'"),
    ],
)
async def test_wrong_report_is_one_sentence_and_changes_nothing(
    fields: dict[str, str], code: str, sentence: str
) -> None:
    held = Held()
    session = held.owned.open(DOMAIN)
    with pytest.raises(RejectedError, match=sentence) as error:
        held.report(session, fields.pop("type", HEALTHY), **fields)
    assert error.value.code is grpc.StatusCode[code]
    assert held.owned.numbers(DOMAIN) == (0, 0)


async def test_pod_has_a_limited_number_of_conditions_of_an_owner() -> None:
    held = Held(maxPerPod=2)
    session = held.owned.open(DOMAIN)
    held.report(session, f"{DOMAIN}/a")
    held.report(session, f"{DOMAIN}/b")
    with pytest.raises(RejectedError, match="has 2 conditions of"):
        held.report(session, f"{DOMAIN}/c")
    held.report(session, f"{DOMAIN}/c", pod_uid="uid-db")
    held.owned.remove(session, "uid-web", f"{DOMAIN}/a")
    held.report(session, f"{DOMAIN}/c")


@pytest.mark.parametrize(
    ("when_stale", "status"), [("Unknown", "Unknown"), ("False", "False"), ("Keep", "True")]
)
async def test_condition_is_stale_when_its_time_is_over_and_not_before(
    when_stale: str, status: str
) -> None:
    held = Held(staleAfterSeconds=30, whenStale=when_stale)
    session = held.owned.open(DOMAIN)
    held.report(session)
    await asyncio.sleep(3600)
    assert held.shown() == ("True", "Fine")
    held.owned.close(session)
    await asyncio.sleep(29.5)
    assert held.shown() == ("True", "Fine")
    await asyncio.sleep(1)
    assert held.shown() == (status, "OwnerGone")
    assert held.owned.numbers(DOMAIN) == (1, 1)
    held.report(held.owned.open(DOMAIN))
    assert held.shown() == ("True", "Fine")


async def test_change_of_what_stale_means_changes_stale_conditions() -> None:
    held = Held(staleAfterSeconds=1)
    session = held.owned.open(DOMAIN)
    held.report(session)
    held.owned.close(session)
    await asyncio.sleep(2)
    assert held.shown() == ("Unknown", "OwnerGone")
    held.set_owner(staleAfterSeconds=1, whenStale="Keep")
    assert held.shown() == ("True", "OwnerGone")


async def test_transition_time_changes_with_the_status_alone() -> None:
    held = Held()
    session = held.owned.open(DOMAIN)
    held.report(session)
    first = held.conditions.get("uid-web", HEALTHY)
    held.report(session, reason="StillFine")
    second = held.conditions.get("uid-web", HEALTHY)
    held.report(session, status="False", reason="Hot")
    third = held.conditions.get("uid-web", HEALTHY)
    assert first
    assert second
    assert third
    assert first.last_transition_time == second.last_transition_time
    assert third.last_transition_time > second.last_transition_time


async def test_condition_is_of_the_session_that_reported_it_last() -> None:
    """As in a roll-out: the new process opens its stream before the old one ends."""
    held = Held(staleAfterSeconds=1)
    old, new = held.owned.open(DOMAIN), held.owned.open(DOMAIN)
    held.report(old)
    held.report(old, f"{DOMAIN}/other")
    held.report(new)
    held.owned.close(old)
    await asyncio.sleep(2)
    assert held.shown() == ("True", "Fine")
    assert held.shown(f"{DOMAIN}/other") == ("Unknown", "OwnerGone")
    held.owned.complete(new)
    assert held.shown(f"{DOMAIN}/other") is None
    assert held.shown() == ("True", "Fine")


async def test_report_before_the_sandbox_is_of_the_first_one() -> None:
    """A device plugin reports when the kubelet allocates, before there is a sandbox."""
    held = Held()
    held.sandbox = ""
    session = held.owned.open(DOMAIN)
    assert held.report(session) == ""
    held.sandbox = "sandbox-1"
    held.owned.see_pod("uid-web")
    assert held.shown() == ("True", "Fine")
    held.sandbox = "sandbox-2"
    held.owned.see_pod("uid-web")
    assert held.shown() == ("False", "SandboxChanged")
    assert list(session.resets) == [("uid-web", HEALTHY)]


async def test_conditions_of_a_deleted_pod_are_forgotten() -> None:
    held = Held()
    held.report(held.owned.open(DOMAIN))
    del held.pods["uid-web"]
    held.owned.see_pod("uid-web")
    assert held.owned.content().conditions == []


async def test_saved_conditions_are_restored_in_the_same_boot_only() -> None:
    held = Held()
    held.report(held.owned.open(DOMAIN))
    saved = held.owned.content()
    same, other = Held(), Held()
    same.owned.restore(saved)
    assert same.shown() == ("True", "Fine")
    other.owned.restore(type(saved)(boot="another", conditions=saved.conditions))
    assert other.shown() is None


@pytest.mark.looptime(False)
async def test_owner_that_is_gone_and_awaited_is_a_finding(node: Node) -> None:
    life = Life(node, BOOT)
    gates = (ReadinessGate(HEALTHY),)
    metadata = ObjectMetadata(name="web", namespace="shop", uid="uid-web")
    life.pods.objects["uid-web"] = ApiPod(metadata=metadata, spec=PodSpec(readiness_gates=gates))
    registered = owners.read(owner(DOMAIN, {"user": 1}, staleAfterSeconds=0))
    life.service.owned.set_owners({DOMAIN: registered})
    (one,) = findings.find(agent_report(condition_owners=life.service.statuses()))
    assert one.kind == kinds.CONDITION_OWNER_GONE.name
    assert "reports conditions gpu.example.com/*" in one.sentence
    assert one.pod_names == ["shop/web"]
    web = Pod(uid="uid-web", namespace="shop", name="web")
    life.store.conditions.set(web, HEALTHY, "True", "Fine", "")
    assert findings.find(agent_report(condition_owners=life.service.statuses())) == []
    life.store.conditions.set(web, HEALTHY, "False", "Ill", "")
    assert len(findings.find(agent_report(condition_owners=life.service.statuses()))) == 1
    session = life.service.owned.open(DOMAIN)
    assert findings.find(agent_report(condition_owners=life.service.statuses())) == []
    life.service.owned.close(session)
    assert life.service.statuses()[0].gone_since is not None


@pytest.mark.looptime(False)
async def test_invalid_owner_is_a_finding_and_its_last_valid_version_stays(
    node: Node,
) -> None:
    node.write_owners(owner(DOMAIN, {"user": 1}))
    source = FileOwners(node.directory / "owners.yaml", on_change=lambda: None)
    running = asyncio.create_task(source.run())
    try:
        await polling.until("the owner", lambda: source.owners)
        first = source.owners
        node.write_owners(owner(DOMAIN, {"user": -1}), owner("podgate.io", {"user": 1}))
        await polling.until("the problems", lambda: len(source.problems) == 2)
        assert source.owners == first
        found = findings.find(agent_report(condition_owner_problems=source.problems))
        assert [one.kind for one in found] == [kinds.CONDITION_OWNER_INVALID.name] * 2
        assert "its last valid version stays" in found[0].sentence
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_pods_of_the_api_server_are_compared_again_with_new_owners() -> None:
    """Conditions that are no owner's any more are removed there."""
    held = Held()
    pod = ApiPod(metadata=ObjectMetadata(uid="uid-web", namespace="shop", name="web"))
    held.owned.see_api(pod)
    changes = held.conditions.changes.subscribe()
    held.owned.set_owners({})
    assert changes.take() == ["uid-web"]
    assert held.owned.is_withdrawn("uid-web", HEALTHY)


async def test_what_changes_the_saved_state_is_saved() -> None:
    held = Held(staleAfterSeconds=1)
    assert held.has_saved()
    session = held.owned.open(DOMAIN)
    assert not held.has_saved()
    for kind in (HEALTHY, f"{DOMAIN}/tested"):
        held.report(session, kind)
        assert held.has_saved()
    held.report(session)
    held.owned.see_pod("uid-web")
    held.owned.remove(session, "uid-web", f"{DOMAIN}/other")
    assert not held.has_saved()
    held.owned.remove(session, "uid-web", f"{DOMAIN}/tested")
    assert held.has_saved()
    held.sandbox = "sandbox-2"
    held.owned.see_pod("uid-web")
    assert held.has_saved()
    held.owned.close(session)
    assert held.has_saved()
    await asyncio.sleep(2)
    assert held.has_saved()
    held.owned.complete(held.owned.open(DOMAIN))
    assert held.has_saved()
    assert held.owned.content().conditions == []
    del held.pods["uid-web"]
    held.owned.see_pod("uid-web")
    assert not held.has_saved()


@pytest.mark.parametrize(("before", "after"), [(1, 30), (30, 1), (2, 2)])
async def test_conditions_that_wait_for_their_owner_wait_as_long_as_it_is_registered_now(
    before: int, after: int
) -> None:
    held = Held(staleAfterSeconds=before)
    session = held.owned.open(DOMAIN)
    held.report(session)
    held.owned.close(session)
    held.set_owner(staleAfterSeconds=after)
    await asyncio.sleep(after - 0.5)
    assert held.shown() == ("True", "Fine")
    with structlog.testing.capture_logs() as logs:
        await asyncio.sleep(40)
    assert held.shown() == ("Unknown", "OwnerGone")
    assert [
        (one["owner"], one["conditions"])
        for one in logs
        if one["event"] == Event.CONDITION_OWNER_GONE
    ] == [(DOMAIN, 1)]


async def test_each_session_that_ends_has_a_time_of_its_own() -> None:
    held = Held(staleAfterSeconds=10)
    other = f"{DOMAIN}/other"
    first, second = held.owned.open(DOMAIN), held.owned.open(DOMAIN)
    held.report(first)
    held.report(second, other)
    held.owned.close(first)
    await asyncio.sleep(5)
    held.owned.close(second)
    await asyncio.sleep(5.5)
    assert (held.shown(), held.shown(other)) == (("Unknown", "OwnerGone"), ("True", "Fine"))
    assert held.owned.numbers(DOMAIN) == (2, 1)
    await asyncio.sleep(5)
    assert (held.shown(), held.shown(other)) == (("Unknown", "OwnerGone"),) * 2
    assert held.owned.numbers(DOMAIN) == (2, 2)


async def test_owner_is_present_while_any_of_its_sessions_is_open() -> None:
    held = Held()
    with structlog.testing.capture_logs() as logs:
        assert not held.owned.is_present(DOMAIN)
        assert held.owned.gone_since(DOMAIN) is not None
        first, second = held.owned.open(DOMAIN), held.owned.open(DOMAIN)
        assert held.owned.is_present(DOMAIN)
        assert not held.owned.is_present("other.example.com")
        held.owned.close(held.owned.open(DOMAIN))
        held.owned.close(first)
        assert held.owned.is_present(DOMAIN)
        assert held.owned.gone_since(DOMAIN) is None
        held.owned.close(second)
        assert not held.owned.is_present(DOMAIN)
        assert held.owned.gone_since(DOMAIN) is not None
    assert [(one["event"], one["owner"]) for one in logs] == [
        (Event.CONDITION_OWNER_CONNECTED, DOMAIN),
        (Event.CONDITION_OWNER_DISCONNECTED, DOMAIN),
    ]


async def test_conditions_of_a_removed_owner_are_removed_from_all_pods() -> None:
    held = Held()
    session = held.owned.open(DOMAIN)
    for uid in held.pods:
        held.report(session, pod_uid=uid)
    with structlog.testing.capture_logs() as logs:
        held.owned.set_owners({})
    removals = [one for one in logs if one["event"] == Event.CONDITION_OWNER_REMOVED]
    assert [(one["owner"], one["conditions"]) for one in removals] == [(DOMAIN, 2)]
    assert session.wake.is_set()
    assert [held.conditions.get(uid, HEALTHY) for uid in held.pods] == [None, None]
    assert held.owned.content().conditions == []
    with pytest.raises(RejectedError, match=f"the ConditionOwner {DOMAIN} was deleted") as error:
        held.report(session)
    assert error.value.code is grpc.StatusCode.NOT_FOUND


async def test_repeated_report_may_be_about_a_previous_sandbox() -> None:
    """Its response was lost with the last stream, and the pod has another sandbox since."""
    held = Held()
    session = held.owned.open(DOMAIN)
    held.report(session)
    held.owned.close(session)
    session = held.owned.open(DOMAIN)
    assert held.report(session, is_repeated=True) == "sandbox-1"
    held.owned.close(session)
    held.sandbox = "sandbox-2"
    held.owned.see_pod("uid-web")
    session = held.owned.open(DOMAIN)
    with pytest.raises(RejectedError, match="shop/web has another sandbox since") as error:
        held.report(session, is_repeated=True)
    assert error.value.code is grpc.StatusCode.ABORTED
    assert held.shown() == ("False", "SandboxChanged")
    # Its owner has checked it, or is another process.
    assert held.report(session) == "sandbox-2"
    assert held.shown() == ("True", "Fine")
    assert held.report(session, is_repeated=True) == "sandbox-2"


async def test_report_about_a_previous_sandbox_changes_nothing() -> None:
    held = Held()
    session = held.owned.open(DOMAIN)
    assert held.report(session, sandbox="sandbox-1") == "sandbox-1"
    held.sandbox = "sandbox-2"
    held.owned.see_pod("uid-web")
    assert list(session.resets) == [("uid-web", HEALTHY)]
    assert session.wake.is_set()
    with pytest.raises(RejectedError, match="shop/web has another sandbox since") as error:
        held.report(session, sandbox="sandbox-1")
    assert error.value.code is grpc.StatusCode.ABORTED
    assert held.shown() == ("False", "SandboxChanged")
    assert held.report(session, sandbox="sandbox-2") == "sandbox-2"
    assert held.shown() == ("True", "Fine")
    assert list(session.resets) == []


async def test_rejected_report_about_a_previous_sandbox_keeps_the_condition_with_its_owner() -> (
    None
):
    held = Held(staleAfterSeconds=1)
    old, new = held.owned.open(DOMAIN), held.owned.open(DOMAIN)
    held.report(old)
    with pytest.raises(RejectedError):
        held.report(new, sandbox="sandbox-0")
    held.owned.close(old)
    held.owned.complete(new)
    await asyncio.sleep(2)
    assert held.shown() == ("True", "Fine")


@pytest.mark.parametrize(
    ("stamp", "reason", "shown", "stale"),
    [
        (SandboxStamp("sandbox-1", BOOT), "Fine", ("True", "Fine"), 0),
        (SandboxStamp("", BOOT), "Fine", ("True", "Fine"), 0),
        (SandboxStamp("sandbox-0", BOOT), "Fine", ("False", "SandboxChanged"), 0),
        (SandboxStamp("sandbox-1", "another"), "Fine", ("False", "SandboxChanged"), 0),
        (SandboxStamp("sandbox-1", BOOT), "OwnerGone", ("True", "OwnerGone"), 1),
    ],
)
async def test_condition_that_the_api_has_is_held_until_its_owner_has_been_gone_too_long(
    stamp: SandboxStamp, reason: str, shown: tuple[str, str], stale: int
) -> None:
    held = Held(staleAfterSeconds=10)
    held.has_saved()
    written = PodCondition(type=HEALTHY, status="True", reason=reason, message=f"All pass.{stamp}")
    foreign = PodCondition(type=f"{DOMAIN}/foreign", status="True", reason="Own")
    pod = ApiPod(
        metadata=ObjectMetadata(uid="uid-web", namespace="shop", name="web"),
        status=ApiPodStatus(conditions=(written, foreign)),
    )
    held.owned.see_api(pod)
    assert held.has_saved()
    assert held.shown() == shown
    assert held.owned.numbers(DOMAIN) == (1, stale)
    assert not held.owned.is_withdrawn("uid-web", HEALTHY)
    await asyncio.sleep(9.5)
    assert held.shown() == shown
    await asyncio.sleep(1)
    assert held.shown() == ("True" if stale else "Unknown", "OwnerGone")
    held.owned.remove(held.owned.open(DOMAIN), "uid-web", HEALTHY)
    # What a later version of the pod has is podgate's own report.
    held.owned.see_api(pod)
    assert held.shown() is None
    assert held.owned.is_withdrawn("uid-web", HEALTHY)


async def test_api_does_not_replace_what_an_owner_has_reported() -> None:
    held = Held()
    held.report(held.owned.open(DOMAIN), status="False", reason="Hot")
    stamp = SandboxStamp("sandbox-1", BOOT)
    written = PodCondition(type=HEALTHY, status="True", reason="Fine", message=f"All pass.{stamp}")
    pod = ApiPod(
        metadata=ObjectMetadata(uid="uid-web", namespace="shop", name="web"),
        status=ApiPodStatus(conditions=(written,)),
    )
    assert not held.owned.is_withdrawn("uid-web", f"{DOMAIN}/other")
    held.owned.see_api(pod)
    assert held.shown() == ("False", "Hot")
    assert held.owned.is_withdrawn("uid-web", f"{DOMAIN}/other")


async def test_restored_conditions_wait_for_their_owner() -> None:
    held, next_life = Held(), Held(staleAfterSeconds=10)
    session = held.owned.open(DOMAIN)
    held.report(session)
    held.report(session, pod_uid="uid-db")
    saved = held.owned.content()
    assert [one.gone_since for one in saved.conditions] == [None, None]
    next_life.owned.restore(saved)
    assert next_life.shown() == ("True", "Fine")
    restored = next_life.owned.content().conditions
    assert all(one.gone_since for one in restored)
    assert [(one.uid, one.type, one.sandbox) for one in restored] == [
        ("uid-web", HEALTHY, "sandbox-1"),
        ("uid-db", HEALTHY, "sandbox-1"),
    ]
    next_life.set_owner(staleAfterSeconds=10)
    await asyncio.sleep(9.5)
    assert next_life.shown() == ("True", "Fine")
    await asyncio.sleep(1)
    assert next_life.shown() == ("Unknown", "OwnerGone")


async def test_conditions_without_a_pod_are_kept_until_the_list_of_pods_is_complete() -> None:
    held = Held()
    saved_of = Held()
    saved_of.report(saved_of.owned.open(DOMAIN), pod_uid="uid-db")
    is_complete = False
    held.owned = OwnedConditions(
        held.conditions,
        pod_of=lambda uid: None,
        sandbox_of=lambda uid: "",
        has_all_pods=lambda: is_complete,
        boot=BOOT,
        on_change=lambda: None,
    )
    held.owned.restore(saved_of.owned.content())
    held.owned.drop_unknown()
    assert held.owned.numbers(DOMAIN) == (1, 0)
    is_complete = True
    held.owned.drop_unknown()
    assert held.owned.numbers(DOMAIN) == (0, 0)


@pytest.mark.parametrize(
    ("kind", "code"), [("disk.example.com/mounted", "PERMISSION_DENIED"), ("a", "INVALID_ARGUMENT")]
)
async def test_owner_removes_no_condition_of_another(kind: str, code: str) -> None:
    held = Held()
    disk = owners.read(owner("disk.example.com", {"user": 2}))
    held.owned.set_owners({**(held.owned.owners or {}), disk.domain: disk})
    held.report(held.owned.open(disk.domain), "disk.example.com/mounted")
    session = held.owned.open(DOMAIN)
    with pytest.raises(RejectedError) as error:
        held.owned.remove(session, "uid-web", kind)
    assert error.value.code is grpc.StatusCode[code]
    held.owned.complete(session)
    assert held.shown("disk.example.com/mounted") == ("True", "Fine")
    assert held.owned.changes == {"disk.example.com": 1}


async def test_pod_that_comes_again_has_what_the_api_has_of_it() -> None:
    held = Held()
    stamp = SandboxStamp("sandbox-1", BOOT)
    written = PodCondition(type=HEALTHY, status="True", reason="Fine", message=f"All pass.{stamp}")
    web = ApiPod(
        metadata=ObjectMetadata(uid="uid-web", namespace="shop", name="web"),
        status=ApiPodStatus(conditions=(written,)),
    )
    held.owned.see_api(web)
    pod = held.pods.pop("uid-web")
    held.owned.see_pod("uid-web")
    assert held.owned.numbers(DOMAIN) == (0, 0)
    held.pods["uid-web"] = pod
    held.owned.see_api(web)
    assert held.owned.numbers(DOMAIN) == (1, 0)


async def test_changes_of_an_owner_are_counted() -> None:
    held = Held()
    session = held.owned.open(DOMAIN)
    held.report(session)
    held.report(session)
    assert held.owned.changes == {DOMAIN: 1}
    held.report(session, reason="StillFine")
    held.owned.remove(session, "uid-web", HEALTHY)
    held.owned.remove(session, "uid-web", HEALTHY)
    assert held.owned.changes == {DOMAIN: 3}
