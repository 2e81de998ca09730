"""One run of the cases in a cluster: all pods first, then all policies, then what reaches what."""

import contextlib
import datetime
import signal
import time
from collections.abc import Callable, Iterator, Sequence

import msgspec

from tests.cnp import objects
from tests.cnp.cases import ADMITTED, DROPPED, Case
from tests.cnp.kubectl import Json, Kubectl, KubectlError

POLICIES = "clusternetworkpolicies.policy.networking.k8s.io"
_READY_SECONDS = 180.0
_POLL_SECONDS = 1.0


class NotRunnableError(Exception):
    """The cluster cannot show what the cases are about."""


class Result(msgspec.Struct, frozen=True):
    """Of one case, by origin."""

    name: str
    expected: dict[str, str]
    found: dict[str, str]

    @property
    def is_as_expected(self) -> bool:
        return self.expected == self.found


class Report(msgspec.Struct, frozen=True, rename="camel"):
    """Of one run. pods_are_dropped: whether an ordinary pod is dropped where a policy denies all
    ingress, which no case is about: without it nothing enforces these policies between pods."""

    time: datetime.datetime
    node: str
    kubelet: str
    pods_are_dropped: bool
    results: list[Result]

    @property
    def differing(self) -> list[str]:
        return [one.name for one in self.results if not one.is_as_expected]


class Run:
    """Its objects have its name, and are gone when it ends."""

    def __init__(
        self,
        kubectl: Kubectl,
        cases: Sequence[Case],
        *,
        name: str,
        node: str = "",
        image: str,
        least_seconds: float,
        most_seconds: float,
        clock: Callable[[], float] = time.monotonic,
        log: Callable[[str], None] = lambda _: None,
    ) -> None:
        """node: the first one that is Ready, if empty; least_seconds, most_seconds: from the
        policies to what counts."""
        self._kubectl = kubectl
        self._cases = cases
        self._name = name
        self._node = node
        self._image = image
        self._least_seconds = least_seconds
        self._most_seconds = most_seconds
        self._clock = clock
        self._log = log

    def run(self) -> Report:
        """Raises `NotRunnableError` and `KubectlError`."""
        if not self._kubectl.has("customresourcedefinitions", POLICIES):
            raise NotRunnableError(f"the cluster has no {POLICIES}; name its definition (--crd)")
        node = self._chosen_node()
        with self._namespace():
            addresses = self._start_pods(node["metadata"]["name"])
            self._check_without_policies(addresses)
            self._log("creating policies")
            self._kubectl.create(
                [one for case in self._cases for one in objects.policies(case, run=self._name)]
            )
            found = self._settled(addresses)
            denied = [case.name for case in self._cases if case.ingress == "denied"]
            reached = self._reached(objects.WITNESS, addresses)
            return Report(
                time=datetime.datetime.now(datetime.UTC),
                node=node["metadata"]["name"],
                kubelet=node["status"]["nodeInfo"]["kubeletVersion"],
                pods_are_dropped=not reached & set(denied),
                results=found,
            )

    def _chosen_node(self) -> Json:
        for node in self._kubectl.get("nodes")["items"]:
            conditions = node["status"].get("conditions", [])
            is_ready = any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)
            if node["metadata"]["name"] == self._node or (not self._node and is_ready):
                return dict(node)
        raise NotRunnableError(f"no node {self._node or 'is Ready'}")

    @contextlib.contextmanager
    def _namespace(self) -> Iterator[None]:
        try:
            self._kubectl.create([objects.namespace(self._name)])
            yield
        finally:
            self._remove()

    def _remove(self) -> None:
        """Each step is tried, whatever the one before did. Another interrupt does not end it."""
        self._log("removing everything")
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        errors = []
        steps: tuple[Callable[[], object], ...] = (
            lambda: remove_policies(self._kubectl, self._name),
            self._remove_cgroup,
            lambda: self._kubectl.delete("namespace", self._name),
        )
        for step in steps:
            try:
                step()
            except KubectlError as error:
                errors.append(str(error))
        if errors:
            raise KubectlError("; ".join(errors))

    def _remove_cgroup(self) -> None:
        if self._kubectl.has(f"--namespace={self._name}", "pod", objects.HOST_PROCESS):
            with contextlib.suppress(KubectlError):  # no process has used it
                self._shell(objects.HOST_PROCESS, objects.removing_cgroup(self._name))

    def _start_pods(self, node: str) -> dict[str, str]:
        """Addresses of the cases' pods, by name, once all are Ready."""
        self._log(f"creating {len(self._cases)} pods on {node}")
        common = {"run": self._name, "node": node, "image": self._image}
        pods = [objects.server(case, **common) for case in self._cases]
        self._await_account()
        self._kubectl.create([*pods, *objects.origins(**common)])
        deadline = self._clock() + _READY_SECONDS
        while True:
            found = self._pods()
            waiting = sorted(name for name, pod in found.items() if not _is_ready(pod))
            if not waiting:
                names = {case.name for case in self._cases}
                return {
                    name: str(pod["status"]["podIP"])
                    for name, pod in found.items()
                    if name in names
                }
            if self._clock() > deadline:
                raise NotRunnableError(f"pods do not become Ready: {', '.join(waiting)}")
            time.sleep(_POLL_SECONDS)

    def _await_account(self) -> None:
        """Pods of a new namespace are rejected until it has its service account."""
        deadline = self._clock() + _READY_SECONDS
        while not self._kubectl.has(f"--namespace={self._name}", "serviceaccount", "default"):
            if self._clock() > deadline:
                raise NotRunnableError("the namespace gets no service account")
            time.sleep(_POLL_SECONDS)

    def _check_without_policies(self, addresses: dict[str, str]) -> None:
        self._log("connecting without policies")
        for origin in (objects.HOST_PROCESS, objects.HOST_NETWORK):
            if missing := addresses.keys() - self._reached(origin, addresses):
                raise NotRunnableError(
                    f"{origin} does not reach {', '.join(sorted(missing))} without any policy"
                )

    def _settled(self, addresses: dict[str, str]) -> list[Result]:
        """What is found once it is as expected and stays so, or at last."""
        start = self._clock()
        was_expected = False
        while True:
            found = self._observe(addresses)
            is_expected = all(one.is_as_expected for one in found)
            passed = self._clock() - start
            self._log(
                f"{sum(one.is_as_expected for one in found)} of {len(found)} as expected after "
                f"{passed:.0f} s"
            )
            if passed > self._least_seconds and is_expected and was_expected:
                return found
            if passed > self._most_seconds:
                return found
            was_expected = is_expected
            time.sleep(_POLL_SECONDS)

    def _observe(self, addresses: dict[str, str]) -> list[Result]:
        reached = {
            "host-process": self._reached(objects.HOST_PROCESS, addresses),
            "host-network": self._reached(objects.HOST_NETWORK, addresses),
            "kubelet": {name for name, pod in self._pods().items() if _is_ready(pod)},
        }
        return [
            Result(
                case.name,
                case.expected,
                {
                    origin: ADMITTED if case.name in reached[origin] else DROPPED
                    for origin in case.expected
                },
            )
            for case in self._cases
        ]

    def _reached(self, origin: str, addresses: dict[str, str]) -> set[str]:
        script = objects.connecting(addresses)
        if origin == objects.HOST_PROCESS:
            script = objects.as_host_process(script, run=self._name)
        return set(self._shell(origin, script).split())

    def _pods(self) -> dict[str, Json]:
        items = self._kubectl.get(f"--namespace={self._name}", "pods")["items"]
        return {pod["metadata"]["name"]: pod for pod in items}

    def _shell(self, pod: str, script: str) -> str:
        return self._kubectl.shell(self._name, pod, script)


def remove_policies(kubectl: Kubectl, run: str) -> None:
    """run: empty for all runs."""
    if kubectl.has("customresourcedefinitions", POLICIES):
        selector = f"{objects.RUN_LABEL}={run}" if run else objects.RUN_LABEL
        kubectl.delete(POLICIES, f"--selector={selector}")


def remove_all(kubectl: Kubectl) -> None:
    """What runs left that were killed."""
    remove_policies(kubectl, "")
    kubectl.delete("namespaces", f"--selector={objects.RUN_LABEL}")


def _is_ready(pod: Json) -> bool:
    conditions = pod["status"].get("conditions", [])
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)
