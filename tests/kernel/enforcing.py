"""How suites of attacks enforce: PODGATE_TEST_MODE is `enforce` (the default) or `strict`.

In strict they expect the same, since no attacker is the kubelet. Gates that a test sets to enforce
are then in strict, and a relay serves their pods; agents start a relay of their own.
"""

import contextlib
import dataclasses
import functools
import os
import socket
from collections.abc import Callable, Iterator

from agent.pods import isolation
from bpf import loader, pins
from bpf.gates import Attachment, GateConfig, Gates
from bpf.redirect import Redirect
from bpf.rules import Rule, SourceKind
from bpf.verdicts import Mode
from tests.kernel import cgroups, redirecting

_MODES = {mode.label: mode for mode in (Mode.ENFORCE, Mode.STRICT)}

MODE = _MODES[os.environ.get("PODGATE_TEST_MODE", Mode.ENFORCE.label)]
IS_STRICT = MODE is Mode.STRICT
REASON = isolation.STRICT if IS_STRICT else isolation.ENFORCED
"""Of the condition isolation-ready, of a pod in this mode."""
RELAY_RANGES = ("--relay-range4", "198.18.64.0/18", "--relay-range6", "fd00:18:64::/64")
AGENT_OPTIONS = RELAY_RANGES if IS_STRICT else ()

KUBELET = Rule(SourceKind.KUBELET, socket.IPPROTO_TCP)
# From a pod's address to the relay's for it: 198.18.65.1 for 198.18.1.1, fd00:18:64:1::1 for
# fd00:18:0:1::1. No interface has them, as nothing but the kubelet connects to them.
_RELAY_OFFSETS = {4: 64 << 8, 6: 0x64 << 80}

MakeGates = Callable[[loader.Loaded, pins.Pins, Attachment | None], Gates]


class StrictGates(Gates):
    """Gates that are in strict where enforce is wanted, with a relay that serves their pods."""

    def __init__(
        self,
        redirect: Redirect,
        loaded: loader.Loaded,
        installation: pins.Pins,
        attachment: Attachment | None = None,
    ) -> None:
        super().__init__(loaded, installation, attachment)
        self._redirect = redirect

    def install(
        self, ifindex: int, config: GateConfig, *, grace_seconds: float = 0, quickly: bool = False
    ) -> str:
        config = self._in_strict(ifindex, config)
        return super().install(ifindex, config, grace_seconds=grace_seconds, quickly=quickly)

    def configure(self, ifindex: int, config: GateConfig) -> str:
        return super().configure(ifindex, self._in_strict(ifindex, config))

    def _in_strict(self, ifindex: int, config: GateConfig) -> GateConfig:
        if config.mode is not Mode.ENFORCE:
            return config
        for address in config.addresses:
            relay = address + _RELAY_OFFSETS[address.version]
            self._redirect.publish(relay, address, [0], ifindex)
        return dataclasses.replace(config, mode=Mode.STRICT, rules=(*config.rules, KUBELET))


@contextlib.contextmanager
def made_in_mode(loaded: loader.Loaded, installation: pins.Pins) -> Iterator[MakeGates]:
    """How gates are made in this run. The kubelet is a cgroup without processes."""
    if not IS_STRICT:
        yield Gates
        return
    with (
        cgroups.cgroup() as kubelet,
        redirecting.kubelet_config(loaded, kubelet.id),
        redirecting.engaged(loaded, installation) as redirect,
    ):
        yield functools.partial(StrictGates, redirect)
