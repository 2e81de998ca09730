"""State file for `podgate-cni`: how to gate a new pod, also while the agent is not running.

The plugin reads from it which programs are current, how to attach them, and the mode of the pod's
namespace. It is in a directory that a reboot empties, as it does the pins.
"""

import pathlib
from typing import Literal

import msgspec

from agent import state_files
from agent.logs import Event
from agent.pods.pod_modes import NewPodModes
from bpf import abi, sources
from bpf.attachment import Attachment
from bpf.verdicts import Mode

_NAME = "cni.json"

MAX_NAMESPACES = 10_000
"""As many as Kubernetes supports in a cluster; with the longest names they are 750 KiB, and the
plugin reads 1 MiB (STATE_BYTES of deploy/cni/podgate-cni.c)."""


class CniState(msgspec.Struct, frozen=True):
    """The file's content; deploy/cni/podgate-cni.c reads it.

    mode: of pods whose namespace is not in `namespaces`. It is the only thing of a pod that the
    plugin knows; its own label comes with the agent. programs: the directory's name below `progs`.
    A plugin with another schema attaches no gate.
    """

    mode: str
    attachment: Literal["tcx", "clsact"]
    schema: int = abi.SCHEMA
    programs: str = msgspec.field(default_factory=sources.fingerprint)
    namespaces: dict[str, str] = {}


def retire(run_directory: pathlib.Path) -> None:
    """Let new pods start without gates and without waiting for them: podgate is removed.

    Raises `OSError`.
    """
    if run_directory.is_dir():
        publish(run_directory, NewPodModes(Mode.OFF), Attachment.CLSACT)


def publish(run_directory: pathlib.Path, modes: NewPodModes, attachment: Attachment) -> None:
    """Replace the file in one step, once everything is pinned. Raises `OSError`.

    Of more than `MAX_NAMESPACES` namespaces it has the strictest.
    """
    strictest = sorted(modes.namespaces.items(), key=lambda entry: (-entry[1], entry[0]))
    state = CniState(
        modes.default.label,
        attachment.value,
        namespaces={name: mode.label for name, mode in strictest[:MAX_NAMESPACES]},
    )
    # podgate-cni is root's; the file names namespaces of the whole cluster.
    state_files.replace(run_directory / _NAME, msgspec.json.encode(state) + b"\n")


def read(run_directory: pathlib.Path) -> NewPodModes | None:
    """The modes in the file; None if it has none that can be read. Blocks."""
    found = state_files.read(run_directory / _NAME, CniState, failure=Event.CNI_STATE_UNREADABLE)
    if found is None:
        return None
    try:
        namespaces = {name: Mode.from_label(label) for name, label in found.namespaces.items()}
        return NewPodModes(Mode.from_label(found.mode), namespaces)
    except ValueError:
        return None
