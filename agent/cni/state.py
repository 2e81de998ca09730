"""State file for `podgate-cni`: how to gate a new pod, also while the agent is not running.

The plugin reads from it which programs are current and how to attach them. It is in a directory
that a reboot empties, as it does the pins.
"""

import pathlib
from typing import Literal

import msgspec

from agent import state_files
from bpf import abi, sources
from bpf.gates import Attachment
from bpf.verdicts import Mode

_NAME = "cni.json"


class CniState(msgspec.Struct, frozen=True):
    """The file's content; deploy/cni/podgate-cni.c reads it.

    mode: the node's default, since the plugin does not know the pod. programs: the directory's
    name below `progs`. A plugin with another schema attaches no gate.
    """

    mode: str
    attachment: Literal["tcx", "clsact"]
    schema: int = abi.SCHEMA
    programs: str = msgspec.field(default_factory=sources.fingerprint)


def retire(run_directory: pathlib.Path) -> None:
    """Let new pods start without gates and without waiting for them: podgate is removed.

    Raises `OSError`.
    """
    if run_directory.is_dir():
        publish(run_directory, Mode.OFF, Attachment.CLSACT)


def publish(run_directory: pathlib.Path, mode: Mode, attachment: Attachment) -> None:
    """Replace the file in one step, once everything is pinned. Raises `OSError`."""
    state = CniState(mode.label, attachment.value)
    state_files.replace(run_directory / _NAME, msgspec.json.encode(state) + b"\n", mode=0o644)
