"""Which command each user of `kubectl podgate` may run, by a real API server.

`yes`: no right is missing; what needs a kubelet fails later here. `no`: one is, and the command
names that. `uninstall` needs the rights of an administrator.
"""

import copy
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from agent.operate.kubectl.verification import manifests, node_run
from agent.operate.kubectl.verification.manifests import Image
from tests.cluster import users
from tests.cluster.api import Json
from tests.cluster.api_only import ApiOnly
from tests.cluster.users import PODS, Plugin
from tests.image import manifests as podgates

pytestmark = pytest.mark.kernel

COMMANDS: dict[str, tuple[str, ...]] = {
    "status": ("status",),
    "drops": ("drops",),
    "drops -n shop": ("drops", "-n", "shop"),
    "why-not-ready": ("why-not-ready", "shop/web"),
    "doctor": ("doctor",),
    "explain": ("explain", "--from", "unit:a.service", "--to", "shop/web", "--port", "8080"),
    "suggest": ("suggest", "-n", "shop"),
    "exec": ("exec", "node1", "maps"),
    "off": ("off",),
    "verify": ("verify", "--wait", "1"),
}
TABLE = """
                auditor  operator  verifier  editor  developer  stranger
status          yes      yes       no        no      no         no
drops           yes      yes       no        no      no         no
drops -n shop   yes      yes       no        yes     no         no
why-not-ready   no       yes       no        yes     yes        no
doctor          no       yes       no        no      no         no
explain         no       yes       no        no      no         no
suggest         no       yes       no        no      no         no
exec            no       yes       no        no      no         no
off             no       yes       no        no      no         no
verify          no       no        yes       no      no         no
"""


@pytest.fixture(scope="module")
def server(isolated: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiOnly]:
    with users.running(tmp_path_factory.mktemp("api")) as made:
        yield made


@pytest.fixture
async def plugin(
    server: ApiOnly, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Plugin]:
    async with users.agent(server):
        yield users.plugin(server, capsys, monkeypatch)


async def test_each_user_may_run_what_the_table_has(
    plugin: Plugin, monkeypatch: pytest.MonkeyPatch
) -> None:
    # No kubelet ends its pods.
    monkeypatch.setattr(node_run, "_DELETE_SECONDS", 0.0)
    header, *rows = TABLE.strip("\n").splitlines()
    for row in rows:
        command = row[:14].strip()
        for name, wanted in zip(header.split(), row[14:].split(), strict=True):
            status, output, errors = await plugin(name, *COMMANDS[command])
            assert may(status, output + errors) == wanted, (command, name, output, errors)


def may(status: int, text: str) -> str:
    """What an answer lacks is on standard error, too."""
    return "no" if status and "orbidden" in text else "yes"


def shaped(server: ApiOnly) -> Json:
    """The pod on the node's network of a run."""
    container = podgates.agent_pod("any")["spec"]["containers"][0]
    return manifests.prober(Image(container["image"]), "run", "node1", [], life_seconds=90)


def create(server: ApiOnly, pod: Json) -> tuple[int, str]:
    """As the verifier, without storing it."""
    token = users.verifier_token(server)
    answer = server.send("POST", f"{PODS}?dryRun=All", pod, token=token)
    return answer.code, answer.message


def changed(pod: Json, path: str, value: Any) -> Json:
    """A copy with another value at a path such as "spec/hostPID"; numbers are of lists."""
    made = copy.deepcopy(pod)
    *above, last = path.split("/")
    place: Any = made
    for name in above:
        place = place[int(name)] if name.isdecimal() else place.setdefault(name, {})
    place[last] = value
    return made


def test_pods_of_a_run_are_admitted(server: ApiOnly) -> None:
    image = Image(podgates.agent_pod("any")["spec"]["containers"][0]["image"])
    canary = manifests.canary(
        image, "run", "node1", mode="strict", has_agent=True, life_seconds=210
    )
    for pod in (shaped(server), canary):
        code, message = create(server, pod)
        assert code == 201, message


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("metadata/labels/app.kubernetes.io~name", "podgate", "are yours"),
        ("spec/hostPID", True, "no volumes"),
        ("spec/hostIPC", True, "no volumes"),
        ("spec/volumes", [{"name": "root", "hostPath": {"path": "/"}}], "no volumes"),
        ("spec/initContainers", [{"name": "a", "image": "b"}], "no volumes"),
        ("spec/automountServiceAccountToken", True, "no volumes"),
        ("spec/serviceAccountName", "podgate", "no volumes"),
        ("spec/activeDeadlineSeconds", 86400, "no volumes"),
        ("spec/securityContext/seccompProfile", {"type": "Unconfined"}, "no volumes"),
        ("spec/containers/0/image", "example.com/other", "have podgate's image"),
        ("spec/containers/0/command", ["/usr/bin/python3", "-c"], "its own commands"),
        ("spec/containers/0/command", ["podgate", "cleanup"], "its own commands"),
        ("spec/containers/0/env", [{"name": "PYTHONPATH", "value": "/tmp"}], "its own commands"),
        ("spec/containers/0/lifecycle", {"postStart": {"exec": {"command": ["a"]}}}, "its own"),
        ("spec/containers/0/livenessProbe", {"exec": {"command": ["a"]}}, "its own commands"),
        ("spec/containers/0/readinessProbe", {"httpGet": {"port": 1}}, "its own commands"),
        (
            "spec/containers/0/readinessProbe",
            {"tcpSocket": {"port": 1, "host": "127.0.0.1"}},
            "its own commands",
        ),
        ("spec/containers/0/workingDir", "/tmp", "its own commands"),
        ("spec/containers/0/securityContext/privileged", True, ""),
        ("spec/containers/0/securityContext/allowPrivilegeEscalation", True, "no rights"),
        ("spec/containers/0/securityContext/capabilities/add", ["SYS_ADMIN"], "no rights"),
        ("spec/containers/0/securityContext/capabilities/drop", [], "no rights"),
    ],
)
def test_verifier_creates_no_other_pod(
    server: ApiOnly, path: str, value: Any, message: str
) -> None:
    if path.endswith("~name"):
        pod = shaped(server)
        pod["metadata"]["labels"]["app.kubernetes.io/name"] = value
    else:
        pod = changed(shaped(server), path, value)
    code, found = create(server, pod)
    assert code in (403, 422), found
    assert message in found


def test_verifier_deletes_pods_of_runs_alone(server: ApiOnly) -> None:
    token = users.verifier_token(server)
    answer = server.send("DELETE", f"{PODS}/podgate-node1?dryRun=All", {}, token=token)
    assert (answer.code, "are yours" in answer.message) == (403, True), answer
    pod = server.api.create(PODS, changed(shaped(server), "metadata/name", "of-a-run"))
    path = f"{PODS}/{pod['metadata']['name']}"
    answer = server.send("DELETE", f"{path}?gracePeriodSeconds=0", {}, token=token)
    assert answer.code == 200, answer


def test_guard_is_not_for_those_who_may_run_commands_in_agents(server: ApiOnly) -> None:
    """The administrator is root on the nodes anyway."""
    pod = changed(shaped(server), "spec/hostPID", True)
    answer = server.send("POST", f"{PODS}?dryRun=All", pod)
    assert answer.code == 201, answer
