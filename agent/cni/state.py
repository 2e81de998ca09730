"""What `podgate-cni` is told: how to gate a pod that is born, whether or not the agent is there.

A file, since the plugin also has to know which programs are the current ones and how they are to
hang on interfaces; it lies where a reboot takes it away together with the pins.
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
    name below `progs`. A plugin of another schema gates nothing.
    """

    mode: str
    attachment: Literal["tcx", "clsact"]
    schema: int = abi.SCHEMA
    programs: str = msgspec.field(default_factory=sources.fingerprint)


def retire(run_directory: pathlib.Path) -> None:
    """Have new pods start without gates, and without waiting for any: podgate is gone from here.

    Raises `OSError`.
    """
    if run_directory.is_dir():
        publish(run_directory, Mode.OFF, Attachment.CLSACT)


def publish(run_directory: pathlib.Path, mode: Mode, attachment: Attachment) -> None:
    """Replace the file in one step. To be called when everything is pinned. Raises `OSError`."""
    state = CniState(mode.label, attachment.value)
    state_files.replace(run_directory / _NAME, msgspec.json.encode(state) + b"\n", mode=0o644)
