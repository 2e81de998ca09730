"""Runs one probe from inside a pod and reports each step."""

import asyncio
import pathlib
import time
from collections.abc import Callable

import msgspec

from agent.admin.report import AgentReport
from agent.errors import PodgateError
from agent.linux.pod_network import PodNetworkReader
from agent.operate.cli import answers
from probes.engine import hooks, prober, tracing
from probes.netns import Netns, NetnsError
from probes.protocols.client_certificates import (
    NO_CERTIFICATES,
    CertificateError,
    Certificates,
    ClientCertificate,
)
from probes.results import ProbeOutcome
from probes.spec.definitions import HttpGet, Probe


class ProbeCommandError(PodgateError):
    """The probe cannot be run."""


class ProbeLocation(msgspec.Struct, frozen=True):
    """A pod's network namespace and the addresses to dial, the preferred one first."""

    netns: Netns
    addresses: tuple[str, ...]


async def find_netns(path: str) -> ProbeLocation:
    """The pod in this network namespace. Raises `ProbeCommandError`."""
    try:
        netns = Netns.open(path)
        network = await PodNetworkReader().read(netns)
    except NetnsError as error:
        raise ProbeCommandError(str(error)) from error
    except TimeoutError as error:
        raise ProbeCommandError(f"the addresses in {path} were not read in time.") from error
    return ProbeLocation(netns, network.probe_addresses)


async def find_pod(name: str, run_directory: pathlib.Path) -> ProbeLocation:
    """The running agent's pod `name` or `namespace/name`.

    Raises `ProbeCommandError`, and `AgentUnreachableError` without an agent.
    """
    report = await answers.read_async(run_directory, "/status", AgentReport)
    found = [pod for pod in report.pods if name in (pod.name, f"{pod.namespace}/{pod.name}")]
    if not found:
        raise ProbeCommandError(f"the agent has no pod {name}; 'podgate status' lists its pods.")
    if len(found) > 1:
        names = ", ".join(f"{pod.namespace}/{pod.name}" for pod in found)
        raise ProbeCommandError(f"several pods are named {name}; use one of {names}.")
    (pod,) = found
    if pod.netns is None:
        raise ProbeCommandError(f"pod {name} has no network namespace.")
    try:
        return ProbeLocation(Netns.open(pod.netns), tuple(pod.addresses or pod.unconfirmed))
    except NetnsError as error:
        raise ProbeCommandError(str(error)) from error


def read_certificate(certificate: pathlib.Path, key: pathlib.Path) -> ClientCertificate:
    """A client certificate in two files. Raises `ProbeCommandError`."""
    try:
        return ClientCertificate(certificate.read_bytes(), key.read_bytes())
    except OSError as error:
        raise ProbeCommandError(f"{error.filename} cannot be read: {error.strerror}.") from error
    except CertificateError as error:
        raise ProbeCommandError(f"the client certificate is unusable: {error}.") from error


async def run(
    location: ProbeLocation,
    probe: Probe,
    *,
    is_hook: bool,
    on_step: Callable[[float, str, str], None],
    certificates: Certificates = NO_CERTIFICATES,
) -> ProbeOutcome:
    """Run one probe or hook; `on_step` gets milliseconds, address and text of each step.
    certificates: of the client, for a probe that names one."""
    if is_hook:
        assert isinstance(probe.handler, HttpGet)
        plan = hooks.plan(probe.handler, location.addresses, probe.timeout_seconds)
    else:
        plan = prober.plan(probe, location.addresses, certificates=certificates)
    started = time.monotonic()

    def step(address: str, text: str) -> None:
        on_step((time.monotonic() - started) * 1000, address, text)

    running = prober.Prober(asyncio.get_running_loop())
    return await prober.run_once(running, tracing.traced(plan, step), location.netns)


def describe(outcome: ProbeOutcome) -> str:
    """The last line: result, families that responded, and message."""
    families = f" over {' and '.join(outcome.families)}" if outcome.families else ""
    text = tracing.printable(outcome.message)
    return f"{outcome.result.value}{families}{': ' if text else ''}{text}"
