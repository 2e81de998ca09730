"""Toy agents, each a process of a user of its own, whose conditions podgate keeps in the API."""

import pytest
from aiohttp import web

from tests import polling
from tests.agent.api.conditions import toy
from tests.agent.api.conditions.node import BOOT, OWNERS, Node, owner
from tests.agent.api.conditions.toy import Toy
from tests.agent.kube import apiserver

GPU, DISK, OTHER = 51_001, 51_002, 51_003
HEALTHY, MOUNTED = "gpu.example.com/healthy", "disk.example.com/mounted"
# Longer than any test takes, and none at all.
LONG, NONE = {"staleAfterSeconds": 3600}, {"staleAfterSeconds": 0}


@pytest.fixture
def registered(node: Node) -> Node:
    """A node with a pod and two owners, whose conditions outlast a restart."""
    node.server.put(waiting_pod())
    node.register(
        owner("gpu.example.com", {"user": GPU}, **LONG),
        owner("disk.example.com", {"user": DISK}, **LONG, whenStale="False"),
    )
    return node


def waiting_pod() -> apiserver.Json:
    """A pod that waits for a condition, so that this is written at once."""
    made = apiserver.pod("web")
    made["spec"]["readinessGates"] = [{"conditionType": HEALTHY}]
    return made


def report(agent: Toy, kind: str, status: str, reason: str, message: str = "") -> None:
    agent.call("set", "uid-web", kind, status, reason, message)


async def written(node: Node, kind: str, status: str, reason: str) -> None:
    """Wait until the API has it."""
    await polling.until(f"{kind} {status}", lambda: node.is_written("web", kind, status, reason))


async def test_conditions_of_two_agents_reach_the_api_through_an_outage(registered: Node) -> None:
    node = registered
    failing = False

    async def outage(request: web.Request) -> web.StreamResponse | None:
        is_write = failing and request.method == "PATCH"
        return apiserver.error_response(503, "ServiceUnavailable") if is_write else None

    node.server.faults.append(outage)
    async with (
        node.agent(),
        toy.running(node.socket, "gpu.example.com", GPU) as gpu,
        toy.running(node.socket, "disk.example.com", DISK) as disk,
    ):
        report(gpu, "healthy", "True", "SelfTestPassed", "All eight GPUs pass.")
        report(disk, "mounted", "False", "Attaching")
        await written(node, HEALTHY, "True", "SelfTestPassed")
        await written(node, MOUNTED, "False", "Attaching")
        text = f"All eight GPUs pass. (sandbox sandbox-1, boot {BOOT})"
        assert node.condition("web", HEALTHY)["message"] == text
        failing = True
        report(gpu, "healthy", "False", "Overheated")
        count = len(node.server.patches())
        await polling.until("a failed write", lambda: len(node.server.patches()) > count)
        report(gpu, "healthy", "True", "CooledDown")
        report(disk, "mounted", "True", "Attached")
        failing = False
        await written(node, HEALTHY, "True", "CooledDown")
        await written(node, MOUNTED, "True", "Attached")


async def test_process_of_another_user_is_rejected(registered: Node) -> None:
    async with (
        registered.agent(),
        toy.running(registered.socket, "gpu.example.com", OTHER) as thief,
    ):
        report(thief, "healthy", "True", "Stolen")
        kind, sentence = await thief.received()
        assert kind == "problem"
        assert "gpu.example.com names other processes than this one (user 51003" in sentence
        assert registered.condition("web", HEALTHY) == {}


async def test_owner_may_not_report_types_of_another_domain(registered: Node) -> None:
    async with registered.agent(), toy.running(registered.socket, "disk.example.com", DISK) as disk:
        report(disk, HEALTHY, "True", "Stolen")
        assert (await disk.received())[:3] == ["rejected", HEALTHY, "PERMISSION_DENIED"]
        report(disk, "podgate.io/isolation-ready", "True", "Stolen")
        assert (await disk.received())[2] == "PERMISSION_DENIED"
        # Its stream is open still.
        report(disk, "mounted", "True", "Attached")
        await written(registered, MOUNTED, "True", "Attached")
        assert registered.condition("web", HEALTHY) == {}


async def test_restart_of_the_agent_changes_nothing_in_the_api(registered: Node) -> None:
    node = registered
    async with toy.running(node.socket, "gpu.example.com", GPU) as gpu:
        async with node.agent():
            report(gpu, "healthy", "True", "SelfTestPassed")
            await written(node, HEALTHY, "True", "SelfTestPassed")
        before = node.condition("web", HEALTHY)
        async with node.agent() as life:
            await polling.until(
                "the owner", lambda: life.service.owned.is_present("gpu.example.com")
            )
            report(gpu, "tested", "True", "SelfTestPassed")
            await written(node, "gpu.example.com/tested", "True", "SelfTestPassed")
    assert node.condition("web", HEALTHY) == before
    assert set(node.statuses(HEALTHY)) == {"True"}


async def test_conditions_outlast_a_lost_state_file(registered: Node) -> None:
    """They are held as the API has them, until their owner reports."""
    node = registered
    async with node.agent(), toy.running(node.socket, "gpu.example.com", GPU) as gpu:
        report(gpu, "healthy", "True", "SelfTestPassed")
        await written(node, HEALTHY, "True", "SelfTestPassed")
    (node.directory / "run" / "state" / "conditions.json").unlink()
    before = node.condition("web", HEALTHY)
    async with node.agent() as life:
        await polling.until(
            "the owners", lambda: life.service.owned.numbers("gpu.example.com") == (1, 0)
        )
    assert node.condition("web", HEALTHY) == before
    assert node.statuses(HEALTHY) == ["True"]


async def test_conditions_of_before_a_reboot_are_false_until_they_are_reported(
    registered: Node,
) -> None:
    node = registered
    async with node.agent(), toy.running(node.socket, "gpu.example.com", GPU) as gpu:
        report(gpu, "healthy", "True", "SelfTestPassed")
        await written(node, HEALTHY, "True", "SelfTestPassed")
    node.sandboxes["uid-web"] = "sandbox-2"
    async with node.agent(boot="another-boot"):
        await written(node, HEALTHY, "False", "SandboxChanged")
        async with toy.running(node.socket, "gpu.example.com", GPU) as gpu:
            report(gpu, "healthy", "True", "SelfTestPassed")
            await written(node, HEALTHY, "True", "SelfTestPassed")
            assert "boot another-boot" in node.condition("web", HEALTHY)["message"]


async def test_owner_that_dies_leaves_stale_conditions_and_its_successor_renews_them(
    node: Node,
) -> None:
    node.server.put(waiting_pod())
    node.register(
        owner("gpu.example.com", {"user": GPU}, **NONE),
        owner("disk.example.com", {"user": DISK}, **NONE, whenStale="False"),
    )
    async with node.agent():
        async with (
            toy.running(node.socket, "gpu.example.com", GPU) as gpu,
            toy.running(node.socket, "disk.example.com", DISK) as disk,
        ):
            report(gpu, "healthy", "True", "SelfTestPassed", "All pass.")
            report(disk, "mounted", "True", "Attached")
            await written(node, HEALTHY, "True", "SelfTestPassed")
            await written(node, MOUNTED, "True", "Attached")
            await gpu.kill()
            await written(node, HEALTHY, "Unknown", "OwnerGone")
            assert "True (SelfTestPassed) All pass." in node.condition("web", HEALTHY)["message"]
            assert node.is_written("web", MOUNTED, "True", "Attached")
            await disk.kill()
            await written(node, MOUNTED, "False", "OwnerGone")
        async with toy.running(node.socket, "gpu.example.com", GPU) as gpu:
            report(gpu, "healthy", "True", "SelfTestPassed")
            await written(node, HEALTHY, "True", "SelfTestPassed")


async def test_owner_that_restarts_within_its_time_changes_nothing(registered: Node) -> None:
    node = registered
    async with node.agent() as life:
        async with toy.running(node.socket, "gpu.example.com", GPU) as gpu:
            report(gpu, "healthy", "True", "SelfTestPassed")
            report(gpu, "tested", "True", "SelfTestPassed")
            await written(node, "gpu.example.com/tested", "True", "SelfTestPassed")
            await written(node, HEALTHY, "True", "SelfTestPassed")
            count = len(node.server.patches())
            await gpu.kill()
        owned = life.service.owned
        await polling.until("its absence", lambda: not owned.is_present("gpu.example.com"))
        async with toy.running(node.socket, "gpu.example.com", GPU) as gpu:
            report(gpu, "healthy", "True", "SelfTestPassed")
            await polling.until("its presence", lambda: owned.is_present("gpu.example.com"))
            assert len(node.server.patches()) == count
            # What its predecessor had reported, and it has not, is no more.
            gpu.call("complete")
            await polling.until(
                "the removal", lambda: not node.condition("web", "gpu.example.com/tested")
            )
        assert set(node.statuses(HEALTHY)) == {"True"}


async def test_conditions_go_with_their_registration(registered: Node) -> None:
    node = registered
    foreign = {"type": "gpu.example.com/of-a-controller", "status": "True", "reason": "Own"}
    web = node.server.get("web")
    web["status"]["conditions"] = [foreign]
    node.server.put(web)
    async with node.agent(), toy.running(node.socket, "gpu.example.com", GPU) as gpu:
        report(gpu, "healthy", "True", "SelfTestPassed")
        await written(node, HEALTHY, "True", "SelfTestPassed")
        node.server.delete("gpu.example.com", namespace="", path=OWNERS)
        await polling.until("the removal", lambda: not node.condition("web", HEALTHY))
        assert await gpu.received() == [
            "problem",
            "cannot publish conditions: there is no ConditionOwner 'gpu.example.com'",
        ]
        # podgate has not written it.
        assert node.condition("web", "gpu.example.com/of-a-controller") == foreign
    # Also while no agent runs.
    async with node.agent():
        node.register(owner("gpu.example.com", {"user": GPU}, **LONG))
        async with toy.running(node.socket, "gpu.example.com", GPU) as gpu:
            report(gpu, "healthy", "True", "SelfTestPassed")
            await written(node, HEALTHY, "True", "SelfTestPassed")
    node.server.delete("gpu.example.com", namespace="", path=OWNERS)
    async with node.agent():
        await polling.until("the removal", lambda: not node.condition("web", HEALTHY))


async def test_foreign_change_is_corrected(registered: Node) -> None:
    node = registered
    async with node.agent(), toy.running(node.socket, "gpu.example.com", GPU) as gpu:
        report(gpu, "healthy", "False", "Overheated")
        await written(node, HEALTHY, "False", "Overheated")
        web = node.server.get("web")
        web["status"]["conditions"] = [{"type": HEALTHY, "status": "True", "reason": "Forged"}]
        node.server.put(web)
        await written(node, HEALTHY, "False", "Overheated")


async def test_new_sandbox_is_reported_to_the_owner(registered: Node) -> None:
    node = registered
    async with node.agent() as life, toy.running(node.socket, "gpu.example.com", GPU) as gpu:
        report(gpu, "healthy", "True", "SelfTestPassed")
        await written(node, HEALTHY, "True", "SelfTestPassed")
        life.set_sandbox("uid-web", "sandbox-2")
        assert await gpu.received() == ["reset", "uid-web", HEALTHY]
        await written(node, HEALTHY, "False", "SandboxChanged")
        report(gpu, "healthy", "True", "SelfTestPassed")
        await written(node, HEALTHY, "True", "SelfTestPassed")


async def test_report_of_a_previous_sandbox_is_not_repeated_to_the_next_agent(
    registered: Node,
) -> None:
    node = registered
    async with toy.running(node.socket, "gpu.example.com", GPU) as gpu:
        async with node.agent():
            report(gpu, "healthy", "True", "SelfTestPassed")
            await written(node, HEALTHY, "True", "SelfTestPassed")
        node.sandboxes["uid-web"] = "sandbox-2"
        async with node.agent():
            await written(node, HEALTHY, "False", "SandboxChanged")
            received = [await gpu.received()]
            while received[-1][0] != "reset":
                received.append(await gpu.received())
            assert received[-1] == ["reset", "uid-web", HEALTHY]
            assert node.is_written("web", HEALTHY, "False", "SandboxChanged")


async def test_node_without_an_api_server_reads_owners_from_a_file(node: Node) -> None:
    node.server.put(apiserver.pod("web"))
    node.write_owners(owner("gpu.example.com", {"user": GPU}, **LONG))
    async with node.agent() as life, toy.running(node.socket, "gpu.example.com", GPU) as gpu:
        report(gpu, "healthy", "True", "SelfTestPassed")
        conditions = life.store.conditions
        await polling.until("the condition", lambda: conditions.get("uid-web", HEALTHY))
        node.write_owners(owner("disk.example.com", {"user": DISK}))
        await polling.until("its end", lambda: not conditions.get("uid-web", HEALTHY))
