"""A day in audit, and the same day under enforce with the policies that it suggests.

Sources, pods and gates are real; only the hours of the day are the test's.
"""

import asyncio
import concurrent.futures
import contextlib
import datetime
import json
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import msgspec
import pytest

from agent import labels as agent_labels
from agent.admin import client as admin_client
from agent.admin.observations import Observations
from agent.admin.report import RulesReport
from agent.drops.history import SourceHistory
from agent.drops.source_processes import SourceProcesses
from agent.lab.agent_process import AgentProcess
from agent.lab.lab import Lab, LabPod
from agent.linux.pod_network import HostInterface
from agent.pods.conditions import Conditions
from agent.pods.object_labels import ObjectLabels
from agent.pods.pod import Pod
from agent.pods.store import PodStore
from agent.settings import admin_socket
from bpf import loader
from bpf.drop_sources import DropSources
from bpf.gates import GateConfig, Gates
from bpf.verdicts import Mode
from tests import polling
from tests.kernel import cgroups
from tests.kernel.cgroups import Cgroup
from tests.kernel.test_agent import is_dropped, isolated_as, reaches

pytestmark = pytest.mark.kernel

T = TypeVar("T")

PORT = 8080
MIDNIGHT = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
INGRESS = {"app": "ingress"}
ONCE = cgroups.unique("once.service")


class Day:
    """A clock that only the test advances."""

    def __init__(self) -> None:
        self._hours = [(time.monotonic_ns(), 0.0)]

    def pass_until(self, hour: float) -> None:
        self._hours.append((time.monotonic_ns(), hour))

    def at(self, monotonic_ns: int) -> datetime.datetime:
        hour = next(hour for since, hour in reversed(self._hours) if since <= monotonic_ns)
        return MIDNIGHT + datetime.timedelta(hours=hour)


class Sources:
    """Cgroups as systemd and the kubelet make them."""

    def __init__(self, made: contextlib.ExitStack) -> None:
        self._made = made
        self.metrics = self._add(cgroups.unique("metrics.service"))
        self.backup = self._add(cgroups.unique("backup.service"))
        self.once = self._add(ONCE)
        self.stranger = self._add(f"session-{cgroups.unique('x')}.scope")
        self.passer_by = self._add("")
        above = self._add("")
        self._kubepods = self._add("burstable", self._add("kubepods", above))

    def ingress(self, number: int) -> Cgroup:
        """A container of the hostNetwork pod with this number."""
        return self._add("container", self._add(f"pod{uid(number)}", self._kubepods))

    def _add(self, name: str, below: Cgroup | None = None) -> Cgroup:
        return self._made.enter_context(cgroups.cgroup(name, below=below or cgroups.root()))


def uid(number: int) -> str:
    return f"0123abcd-0123-4567-89ab-{number:012}"


def ingress_pod(number: int) -> Pod:
    return Pod(
        uid=uid(number),
        namespace="edge",
        name=f"ingress-{number}",
        labels={**INGRESS, "controller-revision-hash": str(number)},
        host_network=True,
    )


class Audit:
    """A node in audit: gates, the store of its pods, and the history of sources."""

    def __init__(self, gates: Gates, loaded: loader.Loaded, folder: pathlib.Path, day: Day) -> None:
        self._gates = gates
        self.store = PodStore(Conditions())
        self.store.synced.set()
        labels = ObjectLabels()
        aggregate = DropSources(loaded)
        self._processes = SourceProcesses(
            aggregate, state=folder / "names.json", store=self.store, labels=labels
        )
        self.history = SourceHistory(
            aggregate,
            self._processes,
            state=folder / "history.json",
            store=self.store,
            labels=labels,
            clock=day.at,
        )

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Follow pods and sources in a thread: the lab's netlink sockets need this one's loop."""
        stop = asyncio.Event()

        async def run() -> None:
            runs = [asyncio.create_task(one.run()) for one in (self._processes, self.history)]
            await stop.wait()
            for one in runs:
                one.cancel()
            await asyncio.gather(*runs, return_exceptions=True)

        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            self._loop = asyncio.new_event_loop()
            done = thread.submit(self._loop.run_until_complete, run())
            try:
                yield
            finally:
                self._loop.call_soon_threadsafe(stop.set)
                done.result(30)
                self._loop.close()

    def add(self, pod: LabPod) -> None:
        self._gates.install(pod.ifindex, GateConfig(Mode.AUDIT, pod.addresses))
        self._call(self._add, pod)

    def end(self, pod: LabPod) -> None:
        self._call(self._end, pod)
        self._gates.remove(pod.ifindex)

    def replace(self, old: Pod | None, new: Pod) -> None:
        """A hostNetwork pod, which has no gate."""
        self._call(self._replace, old, new)

    def await_sources(self, *names: str) -> None:
        """Wait until exactly these have names: paths, and namespaces of pods."""

        def are_named() -> bool:
            flows = self.history.observations().flows
            found = {one.source_pod.namespace if one.source_pod else one.cgroup for one in flows}
            assert found <= {*names, "(gone)"}, found
            return found == set(names)

        polling.wait_until("sources have names", are_named)

    def _add(self, pod: LabPod) -> None:
        self.store.set_pod(web(pod))
        self.store.pods[pod.name].gates[pod.ifindex] = HostInterface(pod.ifindex, pod.interface)
        self.store.in_force.mark(pod.name)

    def _end(self, pod: LabPod) -> None:
        self.store.remove_pod(pod.name)
        self.store.removed.pop(pod.name)
        self.store.in_force.mark(pod.name)

    def _replace(self, old: Pod | None, new: Pod) -> None:
        if old:
            self.store.remove_pod(old.uid)
            self.store.removed.pop(old.uid)
        self.store.set_pod(new)

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        async def call() -> None:
            function(*arguments)

        asyncio.run_coroutine_threadsafe(call(), self._loop).result(30)


def web(pod: LabPod) -> Pod:
    labels = {"app": "web", "pod-template-hash": pod.name}
    return Pod(uid=pod.name, namespace="shop", name=pod.name, labels=labels)


@pytest.fixture
def sources(isolated: None) -> Iterator[Sources]:
    with contextlib.ExitStack() as made:
        yield Sources(made)


def reviewed(printed: str) -> str:
    """What a reviewer applies who knows one service, and none of the others that have a doubt."""
    admitted, *doubtful = printed.split("# ---\n")
    (known,) = (one for one in doubtful if ONCE in one)
    return admitted + "---\n" + "".join(f"{line[2:]}\n" for line in known.splitlines())


def test_a_day_in_audit_suggests_policies_for_the_same_day_under_enforce(
    lab: Lab,
    gates: Gates,
    loaded: loader.Loaded,
    sources: Sources,
    operator: AgentProcess,
    tmp_path: pathlib.Path,
) -> None:
    day = Day()
    audit = Audit(gates, loaded, tmp_path, day)
    first, second = lab.add_pod("web-1", 1), lab.add_pod("web-2", 2)

    known = [one.path for one in (sources.metrics, sources.backup, sources.stranger, sources.once)]

    def call(hour: float, sender: Cgroup, pod: LabPod, port: int = PORT) -> None:
        day.pass_until(hour)
        assert reaches(sender, pod, port)

    with first.listen(PORT), second.listen(PORT), second.listen(PORT + 1):
        with audit.running():
            audit.add(first)
            audit.replace(None, ingress_pod(1))
            ingress = sources.ingress(1)
            call(1, sources.metrics, first)
            call(2, sources.backup, first)
            call(3, sources.stranger, first)
            call(4, sources.once, first)
            call(6, ingress, first)
            call(11, sources.stranger, first)
            audit.await_sources("edge", *known)
            # Roll-outs of the called pod and of the calling one.
            audit.end(first)
            audit.add(second)
            audit.replace(ingress_pod(1), ingress_pod(2))
            cgroups.remove(ingress)
            call(13, sources.metrics, second)
            call(15, sources.passer_by, second, PORT + 1)
            call(18, sources.ingress(2), second)
            call(19, sources.stranger, second)
            call(22, sources.backup, second)
            audit.await_sources("edge", sources.passer_by.path, *known)
            day.pass_until(24)
            seen = audit.history.observations()
            audit.end(second)
        observed = tmp_path / "observed.json"
        observed.write_bytes(msgspec.json.encode({"nodes": [seen]}))
        printed = suggest(operator, observed)
        policies = tmp_path / "rules" / "policies.yaml"
        policies.parent.mkdir()
        policies.write_text(reviewed(printed), encoding="utf-8")
        left = suggest(operator, observed, "--check", str(policies))
        assert f"{sources.passer_by.path} to shop/web-2: TCP {PORT + 1}" in left
        assert f"{sources.stranger.path} to shop/web-2: TCP {PORT}" in left

        enforce(operator, second, policies.parent)
        third = sources.ingress(3)
        polling.wait_until("all sources are resolved", lambda: are_in_force(operator, 4))
        listed = (sources.metrics, sources.backup, sources.once, third)
        for sender in listed:
            assert reaches(sender, second, PORT), sender
        for sender in (sources.stranger, sources.passer_by):
            assert is_dropped(sender, second, PORT), sender
            assert is_dropped(sender, second, PORT + 1), sender
    seen = observations(operator)
    assert {flows.cgroup for flows in seen.flows} == {
        sources.stranger.path,
        sources.passer_by.path,
    }


def suggest(operator: AgentProcess, observed: pathlib.Path, *options: str) -> str:
    done = operator.run("suggest", "--from", str(observed), *options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def enforce(operator: AgentProcess, pod: LabPod, rules: pathlib.Path) -> None:
    """Start an agent that enforces for this pod, beside the third hostNetwork pod."""
    own, other = manifest(web(pod)), manifest(ingress_pod(3))
    own["metadata"]["labels"][agent_labels.MODE_LABEL] = "enforce"
    own["metadata"]["annotations"] = {agent_labels.NETNS_ANNOTATION: pod.netns.path}
    other["spec"]["hostNetwork"] = True
    for one in (own, other):
        operator.write_file(f"{one['metadata']['name']}.yaml", json.dumps(one))
    operator.start("--rules", str(rules))
    operator.wait_for("the gate", isolated_as(pod.name, "Enforced"))


def manifest(pod: Pod) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "uid": pod.uid,
            "name": pod.name,
            "namespace": pod.namespace,
            "labels": dict(pod.labels),
        },
        "spec": {"containers": [{"name": "app", "image": "none"}]},
    }


def are_in_force(operator: AgentProcess, policies: int) -> bool:
    """Whether N policies are, and the agent has found all of their sources."""
    rules = fetch(operator, "/rules", RulesReport)
    problems = [rule.problem for policy in rules.policies for rule in policy.rules]
    return len(rules.policies) == policies and not any(problems)


def observations(operator: AgentProcess) -> Observations:
    return fetch(operator, "/observations", Observations)


def fetch(operator: AgentProcess, resource: str, kind: type[T]) -> T:
    path = admin_socket(operator.run_directory)
    return msgspec.json.decode(asyncio.run(admin_client.fetch(path, resource)), type=kind)
