"""`podgate run`: checks its options and starts an agent."""

import asyncio

from agent.app import handover
from agent.app.agent import Agent
from agent.app.listeners import Listeners
from agent.app.program_loading import Loading
from agent.errors import PodgateError
from agent.gates.worker import GateWorker
from agent.kube.client import ApiClient
from agent.settings import Settings
from bpf import pins


class StartError(PodgateError):
    """The agent cannot start."""


def _check_feed(settings: Settings) -> None:
    if settings.manifests is not None and not settings.manifests.is_dir():
        raise StartError(
            f"{settings.manifests} is not a directory; make it, or name another with --manifests."
        )


async def run(settings: Settings, loading: Loading) -> None:
    """Start an agent and run it to its end. loading: of its programs.

    Raises `StartError`, `NoClusterConfigError`, `AlreadyRunningError`,
    `PinError`, `CompileError` or `ListenError`, each one sentence.
    """
    _check_feed(settings)
    if settings.rules is not None and not settings.rules.exists():
        raise StartError(
            f"{settings.rules} does not exist; create it, or name another with --rules."
        )
    installation = pins.Pins(settings.bpffs)
    installation.prepare()
    try:
        settings.run_directory.mkdir(mode=0o755, parents=True, exist_ok=True)
    except OSError as error:
        raise StartError(
            f"cannot write to {settings.run_directory} ({error.strerror}); "
            "name another directory with --run-directory."
        ) from error
    try:
        handover.remove_started_file(settings.started_file)
    except OSError as error:
        raise StartError(
            f"cannot write {settings.started_file} ({error.strerror}); "
            "name another file with --started-file."
        ) from error
    api = await ApiClient.open(settings.kubeconfig) if settings.node_name else None
    try:
        await _run(settings, installation, api, loading)
    finally:
        if api is not None:
            await api.aclose()


async def _run(
    settings: Settings, installation: pins.Pins, api: ApiClient | None, loading: Loading
) -> None:
    async with handover.hold_node(settings, installation, loading) as is_ours:
        if not is_ours:
            return
        listeners = await Listeners.open(settings)
        try:
            await _run_agent(settings, api, loading, listeners)
        finally:
            listeners.close()


async def _run_agent(
    settings: Settings, api: ApiClient | None, loading: Loading, listeners: Listeners
) -> None:
    gate_worker = await GateWorker.open(settings, await asyncio.wrap_future(loading))
    try:
        agent = Agent(settings, gate_worker, api, listeners)
        try:
            await agent.run()
        finally:
            agent.close()
    finally:
        await gate_worker.aclose()
