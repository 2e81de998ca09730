"""`podgate suggest` as users see it: the YAML to review, and checks of policies."""

import pathlib

import msgspec
import pytest
import yaml
from click.testing import CliRunner, Result

from agent.admin.observations import Observations, ObservedPod
from agent.operate.cli.main import main
from agent.policy import api_types
from tests.agent.policy.observing import IN_POD, OTHER, UID, WEB, flows, node

BACKUP = "/system.slice/backup.service"
INGRESS = ObservedPod(
    namespace="edge", name="ingress-x7", labels={"app": "ingress"}, host_network=True
)
SEEN = node(
    flows(BACKUP, 6, 8080, packets=24, process="restic"),
    flows(BACKUP, 6, 9000, first=3, last=3, packets=1, process="restic"),
    flows(IN_POD, 6, 80, source_pod=INGRESS, packets=1000, process="nginx"),
    flows("/", 17, 53, pod=OTHER, first=14.5, last=14.5, packets=1, process="nc"),
    flows("(gone)", 1, 0, process="ping"),
    flows("/system.slice/known.service", 6, 80),
    policies=[
        {
            "apiVersion": "policy.podgate.io/v1alpha1",
            "kind": "HostAccessPolicy",
            "metadata": {"name": "known"},
            "spec": {
                "pods": {"namespaces": ["shop"]},
                "from": [{"systemdUnit": {"name": "known.service"}}],
            },
        }
    ],
)
GOLDEN = pathlib.Path(__file__).parent / "suggested.yaml"


class Command:
    def __init__(self, folder: pathlib.Path) -> None:
        self._folder = folder
        self._seen = folder / "seen.json"

    def run(self, seen: list[Observations], *arguments: str) -> Result:
        content = [{"nodes": [one]} for one in seen]
        self._seen.write_bytes(msgspec.json.encode(content))
        return CliRunner().invoke(main, ["suggest", "--from", str(self._seen), *arguments])

    def write(self, text: str) -> str:
        path = self._folder / "policies.yaml"
        path.write_text(text, encoding="utf-8")
        return str(path)


@pytest.fixture
def command(tmp_path: pathlib.Path) -> Command:
    return Command(tmp_path)


def policies(text: str) -> list[str]:
    """Names of the valid policies of a YAML text."""
    found = [one for one in yaml.safe_load_all(text) if one is not None]
    return [api_types.read(one, source="x").name for one in found]


def uncommented(text: str, doubt: str) -> str:
    """What a reviewer makes of it who admits all of one doubt."""
    documents = text.split("# ---\n")
    chosen = [one for one in documents[1:] if doubt in one]
    return "---\n" + "---\n".join(
        "".join(f"{line[2:]}\n" for line in one.splitlines()) for one in chosen
    )


def test_suggestions_as_printed(command: Command) -> None:
    done = command.run([SEEN])
    assert done.exit_code == 0
    assert done.output == GOLDEN.read_text(encoding="utf-8")


def test_suggestions_with_a_doubt_are_valid_once_their_comment_is_removed(
    command: Command,
) -> None:
    output = command.run([SEEN]).output
    assert len(policies(output)) == 2
    assert len(policies(uncommented(output, "one occasion"))) == 1
    assert len(policies(uncommented(output, "root cgroup"))) == 1


def test_names_that_processes_choose_cannot_leave_their_comment(command: Command) -> None:
    name = "\n---\nkind: X\r\x1b[2J\u2028a: b"
    pod = msgspec.structs.replace(WEB, name=name)
    hostile = [
        flows(f"/system.slice/{name}", process=name, pod=pod),
        flows(f"/a{name}", process=name, first=1, last=1),
        flows(f"/b{name}", has_many_ports=True, process=name),
    ]
    output = command.run([node(*hostile, name=name)]).output
    assert "\x1b" not in output
    (document,) = (one for one in yaml.safe_load_all(output) if one is not None)
    assert document["spec"]["from"][0]["cgroup"]["path"] == f"/system.slice/{name}"
    doubtful = output[output.index("# ---") :]
    assert all(line.startswith("# ") for line in doubtful.splitlines())


def test_nothing_to_suggest_is_one_sentence(command: Command) -> None:
    done = command.run([node()])
    assert done.exit_code == 0
    assert "no dropped traffic" in done.output
    assert policies(done.output.replace("podgate: ", "# ")) == []


def test_json_can_be_read_again(command: Command, tmp_path: pathlib.Path) -> None:
    output = command.run([SEEN], "--output", "json").output
    # Those without a doubt, as in the manifests.
    listed = [one["metadata"]["name"] for one in msgspec.json.decode(output)["policies"]]
    assert listed == policies(GOLDEN.read_text(encoding="utf-8"))
    again = tmp_path / "again.json"
    again.write_text(output, encoding="utf-8")
    done = CliRunner().invoke(main, ["suggest", "--from", str(again)])
    assert done.output == GOLDEN.read_text(encoding="utf-8")


def test_nodes_are_merged(command: Command) -> None:
    other = msgspec.structs.replace(SEEN, node="node-2")
    output = command.run([SEEN, other]).output
    assert len(policies(output)) == 2
    assert "48 packets, first 2026-01-01 01:00, last 2026-01-01 20:00 UTC, on node-1, node-2" in (
        output
    )


def test_check_of_the_suggested_policies_finds_nothing_else(command: Command) -> None:
    suggested = command.write(command.run([SEEN]).output)
    done = command.run([SEEN], "--check", suggested)
    # The policy that is in force has to be among them.
    assert done.exit_code == 1
    dropped, doubtful = done.output.split("Dropped under these policies, and not suggested:")
    assert dropped.splitlines() == [
        "Dropped under these policies:",
        "  /system.slice/known.service to shop/web-1: TCP 80: 2 packets, first 2026-01-01 01:00, "
        "last 2026-01-01 20:00 UTC, on node-1",
    ]
    assert [line.strip().split()[0] for line in doubtful.splitlines() if " to " in line] == [
        *("ping", "restic", "nc"),
    ]


def test_check_reports_rules_that_admit_nothing(command: Command) -> None:
    known = yaml.safe_dump_all([*SEEN.policies, _unused()])
    output = command.run([SEEN]).output
    done = command.run([SEEN], "--check", command.write(f"{output}---\n{known}"))
    assert done.exit_code == 4
    assert "  idle: unit idle.service to TCP 1\n" in done.output


def _unused() -> dict[str, object]:
    return {
        "apiVersion": "policy.podgate.io/v1alpha1",
        "kind": "HostAccessPolicy",
        "metadata": {"name": "idle"},
        "spec": {
            "pods": {"namespaces": ["shop"]},
            "from": [{"systemdUnit": {"name": "idle.service"}}],
            "ports": [{"port": 1}],
        },
    }


def test_check_without_findings_succeeds(command: Command) -> None:
    seen = node(flows(BACKUP))
    suggested = command.write(command.run([seen]).output)
    done = command.run([seen], "--check", suggested)
    assert (done.exit_code, done.output) == (
        0,
        "All observed sources are admitted, and all rules are used.\n",
    )


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--since", "yesterday"), "neither a duration such as 24h nor a time"),
        (("--min-count", "0"), "--min-count"),
        (("--check", "/nowhere"), "/nowhere does not exist"),
    ],
)
def test_wrong_arguments_are_one_sentence(
    command: Command, arguments: tuple[str, ...], sentence: str
) -> None:
    done = command.run([SEEN], *arguments)
    assert done.exit_code != 0
    assert sentence in done.output


def test_check_of_an_invalid_policy_names_its_place(command: Command) -> None:
    invalid = {**_unused(), "spec": {}}
    done = command.run([SEEN], "--check", command.write(yaml.safe_dump(invalid)))
    assert done.exit_code == 1
    assert "policies.yaml, document 1: spec: object missing required field" in done.output


def test_other_input_is_one_sentence(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "x"
    path.write_text("a: b", encoding="utf-8")
    done = CliRunner().invoke(main, ["suggest", "--from", str(path)])
    assert done.exit_code == 2
    assert "not the output of 'podgate suggest --output json'" in done.output


@pytest.mark.parametrize(
    ("since", "count"), [("2h", 0), ("5h", 1), ("2026-01-01T21:00", 0), ("1d", 1)]
)
def test_since_counts_from_the_end_of_the_observed_time(
    command: Command, since: str, count: int
) -> None:
    output = command.run([node(flows(BACKUP))], "--since", since).output
    assert len(policies(output.replace("podgate: ", "# "))) == count


def test_uid_of_the_pod_is_in_no_policy(command: Command) -> None:
    assert UID not in command.run([SEEN]).output


def test_many_ports_of_a_source_are_counted(command: Command) -> None:
    seen = node(*(flows(BACKUP, 6, port, process="restic") for port in range(8000, 8030)))
    text = command.run([seen]).stdout
    assert "and 20 more ports" in text
    assert text.count("# ") < 30
