"""`podgate run`: checks its options and starts an agent."""

import asyncio

import structlog

from agent import state_files
from agent.app import readiness, watchdog
from agent.app.agent import Agent
from agent.app.handover import Handover
from agent.app.program_loading import Loading
from agent.errors import PodgateError
from agent.gates.worker import GateWorker
from agent.kube.client import ApiClient
from agent.linux import directories
from agent.logs import Event
from agent.serving import descriptors
from agent.settings import Settings
from bpf import pins

log = structlog.get_logger(__name__)


class StartError(PodgateError):
    """The agent cannot start."""


def _check_feed(settings: Settings) -> None:
    if settings.manifests is not None and not settings.manifests.is_dir():
        raise StartError(
            f"{settings.manifests} is not a directory; make it, or name another with --manifests."
        )


async def run(settings: Settings, loading: Loading) -> None:
    """Start an agent and run it to its end. loading: of its programs.

    Raises `StartError`, `NoClusterConfigError`, `AlreadyRunningError`, `TakeOverError`,
    `DirectoryError`, `PinError` or `CompileError`, each one sentence.
    """
    descriptors.raise_limit()
    _check_feed(settings)
    if settings.rules is not None and not settings.rules.exists():
        raise StartError(
            f"{settings.rules} does not exist; create it, or name another with --rules."
        )
    installation = pins.Pins(settings.bpffs)
    installation.prepare()
    try:
        directories.ensure_own(settings.run_directory)
    except OSError as error:
        if not state_files.has_no_room(error):
            raise StartError(
                f"cannot write to {settings.run_directory} ({error.strerror}); "
                "name another directory with --run-directory."
            ) from error
        log.error(Event.RUN_DIRECTORY_UNAVAILABLE, error=str(error))
    try:
        readiness.remove(settings.pod_directory)
        handover = Handover(settings, installation, loading)
    except OSError as error:
        raise StartError(
            f"cannot write to {settings.pod_directory} ({error.strerror}); "
            "name another directory with --pod-directory."
        ) from error
    api = await ApiClient.open(settings.kubeconfig) if settings.node_name else None
    try:
        while await _run(settings, installation, api, loading, handover):
            pass
    finally:
        watchdog.stop()
        readiness.remove(settings.pod_directory)
        if api is not None:
            await api.aclose()


async def _run(
    settings: Settings,
    installation: pins.Pins,
    api: ApiClient | None,
    loading: Loading,
    handover: Handover,
) -> bool:
    """Hold the node once; whether it was handed over to another agent."""
    async with handover.turn() as turn:
        if turn is None:
            return False
        # The other agent may have removed another version's.
        installation.prepare()
        gate_worker = await GateWorker.open(settings, await asyncio.wrap_future(loading))
        try:
            return await Agent(settings, gate_worker, api, handover, turn).run()
        finally:
            await gate_worker.aclose()
