"""`AsyncConditionPublisher` beside an agent's own server, in one event loop."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator

import grpc
import pytest

from agent.client.conditions import AsyncConditionPublisher, Handlers, Rejection
from tests import polling
from tests.agent.api.conditions.node import Node, owner
from tests.agent.kube import apiserver

DOMAIN = "gpu.example.com"
HEALTHY, TESTED = f"{DOMAIN}/healthy", f"{DOMAIN}/tested"


class Program:
    """A node agent: its publisher, and what that reports."""

    def __init__(self, node: Node, domain: str = DOMAIN) -> None:
        self.problems: list[str] = []
        self.rejected: list[Rejection] = []
        self.resets: list[tuple[str, str]] = []
        self.publisher = AsyncConditionPublisher(
            domain,
            f"unix:{node.socket}",
            handlers=Handlers(
                on_problem=self.problems.append,
                on_rejected=self.rejected.append,
                on_reset=lambda uid, kind: self.resets.append((uid, kind)),
            ),
            error_delay_seconds=0.02,
        )

    def set(self, kind: str, status: str, reason: str) -> None:
        self.publisher.set("uid-web", kind, status, reason)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["Program"]:
        task = asyncio.create_task(self.publisher.run())
        try:
            yield self
            assert not task.done()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
def registered(node: Node) -> Node:
    """A node with a pod, and an owner whose conditions are stale as soon as it is gone."""
    web = apiserver.pod("web")
    # What a gate waits for is written at once.
    web["spec"]["readinessGates"] = [{"conditionType": kind} for kind in (HEALTHY, TESTED)]
    node.server.put(web)
    node.register(owner(DOMAIN, {"user": os.getuid()}, staleAfterSeconds=0))
    return node


async def written(node: Node, kind: str, status: str, reason: str) -> None:
    await polling.until(f"{kind} {status}", lambda: node.is_written("web", kind, status, reason))


async def test_what_was_set_before_the_agent_runs_is_reported_to_each_agent(
    registered: Node,
) -> None:
    node, program = registered, Program(registered)
    program.set("healthy", "False", "Starting")
    program.set("healthy", "True", "SelfTestPassed")
    program.set("tested", "True", "SelfTestPassed")
    async with program.running():
        await polling.until("a problem", lambda: program.problems)
        async with node.agent():
            await written(node, HEALTHY, "True", "SelfTestPassed")
            await written(node, TESTED, "True", "SelfTestPassed")
            # Of the same reports only the last one was sent.
            assert set(node.statuses(HEALTHY)) == {"True"}
            program.publisher.remove("uid-web", "tested")
            await polling.until("the removal", lambda: not node.condition("web", TESTED))
        await polling.until("another problem", lambda: len(program.problems) == 2)
        async with node.agent() as life:
            await polling.until("the owner", lambda: life.service.owned.is_present(DOMAIN))
            program.set("healthy", "False", "Overheated")
            await written(node, HEALTHY, "False", "Overheated")
    assert all(one.startswith("cannot publish conditions: ") for one in program.problems)
    assert (program.rejected, program.resets) == ([], [])


async def test_cancelled_program_is_gone_and_its_successor_removes_what_it_lacks(
    registered: Node,
) -> None:
    node, program = registered, Program(registered)
    async with node.agent() as life:
        async with program.running():
            program.set("healthy", "True", "SelfTestPassed")
            program.set("tested", "True", "SelfTestPassed")
            await written(node, HEALTHY, "True", "SelfTestPassed")
            await written(node, TESTED, "True", "SelfTestPassed")
        await written(node, HEALTHY, "Unknown", "OwnerGone")
        assert not life.service.owned.is_present(DOMAIN)
        async with Program(node).running() as successor:
            successor.set("healthy", "True", "SelfTestPassed")
            successor.publisher.complete()
            await written(node, HEALTHY, "True", "SelfTestPassed")
            await polling.until("the removal", lambda: not node.condition("web", TESTED))


async def test_rejection_and_reset_of_one_report_leave_the_stream_open(registered: Node) -> None:
    node = registered
    async with node.agent() as life, Program(node).running() as program:
        program.set("disk.example.com/mounted", "True", "Stolen")
        program.set("healthy", "Maybe", "SelfTestPassed")
        program.set("healthy", "True", "SelfTestPassed")
        await written(node, HEALTHY, "True", "SelfTestPassed")
        await polling.until("the rejection", lambda: program.rejected)
        [stolen, *_] = program.rejected
        assert (stolen.type, stolen.code) == (
            "disk.example.com/mounted",
            grpc.StatusCode.PERMISSION_DENIED,
        )
        life.set_sandbox("uid-web", "sandbox-2")
        await polling.until("a reset", lambda: program.resets)
        assert program.resets == [("uid-web", HEALTHY)]
        await written(node, HEALTHY, "False", "SandboxChanged")
        program.set("healthy", "True", "SelfTestPassed")
        await written(node, HEALTHY, "True", "SelfTestPassed")
        assert program.problems == []


async def test_owner_without_a_registration_gets_one_sentence_and_keeps_trying(
    registered: Node,
) -> None:
    node = registered
    async with node.agent(), Program(node, "disk.example.com").running() as program:
        program.set("mounted", "True", "Attached")
        await polling.until("a problem", lambda: program.problems)
        assert program.problems == [
            "cannot publish conditions: there is no ConditionOwner 'disk.example.com'"
        ]
        node.register(owner("disk.example.com", {"user": os.getuid()}))
        await written(node, "disk.example.com/mounted", "True", "Attached")
        assert len(program.problems) == 1
