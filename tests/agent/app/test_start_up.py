"""What `podgate run` imports before the first gate: each module delays it."""

import subprocess
import sys

import pytest

# Everything that `podgate run` imports before it runs its event loop.
RUN = (
    "agent.operate.cli.main",
    "agent.operate.cli.commands.run",
    "agent.app.program_loading",
    "agent.app.startup",
)
BEFORE_GATES = (*RUN, "agent.sources.cluster")
# Everything that it imports once the first gates are attached.
AFTER_GATES = (
    *("agent.app.pod_services", "agent.app.http_server", "agent.app.remote_metrics"),
    "agent.app.flow_reporting",
)

LATER = (
    "aiohttp",
    *("agent.api.podinfo", "agent.operate.page"),
    *("agent.drops", "agent.probing", "probes.engine", "probes.protocols"),
    *("agent.strict.launcher", "agent.strict.supervisor", "agent.strict.targets"),
    *("agent.app.reports", "agent.app.exporter"),
)
# What only some agents need: those of clusters, and those with service endpoints, owners of
# conditions, clients of PodInfo, or probes by HTTP/2.
OPTIONAL = (
    *("agent.app.cluster_outputs", "agent.app.service_outputs", "agent.network_policy"),
    *("agent.api.conditions.service", "agent.client", "agent.services.api", "h2", "hpack"),
)
NEVER = (
    # 9 MB of memory each: for a process that makes a certificate, and for commands.
    *("cryptography", "pyroute2"),
    "rich",
    "pygments",
    "kubernetes",
    "bcc",
    # Where --flows-otlp is set, in the thread that sends.
    *("opentelemetry", "urllib3", "agent.flows.otlp"),
    "agent.operate.demo",
    "agent.operate.doctor",
    "agent.operate.kubectl",
)


def imported(*modules: str) -> set[str]:
    """All modules, with their packages, that a new interpreter has after importing these."""
    program = f"import sys, {', '.join(modules)}; print(*sys.modules)"
    found = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=60
    )
    return set(found.stdout.split())


@pytest.fixture(scope="module")
def before_gates() -> set[str]:
    return imported(*BEFORE_GATES)


@pytest.fixture(scope="module")
def after_gates() -> set[str]:
    return imported(*BEFORE_GATES, *AFTER_GATES)


@pytest.mark.parametrize("module", LATER)
def test_module_is_imported_after_the_first_gates(
    module: str, before_gates: set[str], after_gates: set[str]
) -> None:
    assert module not in before_gates
    assert module in after_gates


def test_agent_imports_only_the_source_that_it_has(before_gates: set[str]) -> None:
    without_cluster = imported(*RUN, "agent.sources.manifest_source")
    assert "yaml" in without_cluster - before_gates
    assert {"grpc", "google.protobuf"} <= before_gates - without_cluster


def test_agent_without_a_cluster_imports_grpc_for_its_first_client() -> None:
    without_cluster = imported(*RUN, "agent.sources.manifest_source", *AFTER_GATES)
    with_client = imported(*RUN, *AFTER_GATES, "agent.api.podinfo.server")
    assert {"grpc", "google.protobuf"} <= with_client - without_cluster


def test_only_the_command_that_runs_is_imported(before_gates: set[str]) -> None:
    commands = {name for name in before_gates if name.startswith("agent.operate.cli.commands.")}
    assert {name.rpartition(".")[2] for name in commands} == {
        *("run", "cni", "flow_options", "options", "policy_ready_options", "service_options")
    }


@pytest.mark.parametrize("module", OPTIONAL)
def test_module_is_imported_only_where_it_is_needed(module: str, after_gates: set[str]) -> None:
    assert module not in after_gates


@pytest.mark.parametrize("module", NEVER)
def test_module_is_never_imported_by_the_agent(module: str, after_gates: set[str]) -> None:
    assert module not in after_gates
