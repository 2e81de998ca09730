"""A drop reason that is added by the recipe: the gate's program, `podgate explain` and the
specification give it to the same packet.
"""

import pytest

from tests.recipes.conftest import Recipe

pytestmark = pytest.mark.kernel


def test_drop_reason(isolated: None, recipe: Recipe) -> None:
    tree = recipe("Drop reason", "discard")
    tree.edit(
        "bpf/src/abi.h",
        (
            "	REASON_HAIRPIN,	     /* host process, by another machine that sends the SYN "
            "back */\n",
            "	REASON_DISCARD,	     /* to UDP's port 9 */\n",
        ),
    )
    tree.edit(
        "bpf/verdicts.py",
        ("    HAIRPIN = 23\n", "    DISCARD = 24\n"),
        ("        *(Reason.TUNNEL, ", "Reason.DISCARD, "),
        ("_DESCRIPTIONS = {\n", '    Reason.DISCARD: "to UDP\'s port 9, which no server reads",\n'),
    )
    tree.edit(
        "bpf/src/new_flow.h",
        (
            "		return DROP(REASON_STRAY);\n",
            "	if (packet->protocol == IPPROTO_UDP && packet->destination_port == 9)\n"
            "		return DROP(REASON_DISCARD);\n",
        ),
    )
    tree.edit(
        "agent/operate/explain/evaluation.py",
        (
            '        source = "bpf/src/new_flow.h: drop_reason"\n',
            """        if (self._flow.protocol, self._flow.port) == (UDP, 9):
            return self._drop(Reason.DISCARD, "verdict", "no server reads it", source)
""",
        ),
    )
    tree.edit(
        "tests/model/arrival.py",
        (
            "            return Reason.STRAY\n",
            """        if self.packet.protocol == UDP and self.packet.ports[1] == 9:
            return Reason.DISCARD
""",
        ),
        ("DROPS = (Reason.NODE, ", "Reason.DISCARD, "),
    )
    tree.edit("docs/guides/drops.md", ("The counters use the same reasons:\n", ""))
    shown = tree.run(
        """
import dataclasses, ipaddress, pathlib, time
from agent.operate.cli import reference
from agent.operate.explain import confirmation, evaluation
from agent.operate.explain.facts import Facts, Flow, GateFacts
from bpf import (compiling, features, loader, program_specs)
from bpf.gate_config import GateConfig
from bpf.gate_trial import GateTrial
from bpf.rule_evaluation import NodeFacts
from bpf.verdicts import Mode, Reason
from bpf import abi
from tests.bpf import test_verdicts
from tests.kernel.explained import own_source
from tests.model import facts as known, gate as model

# The gate alone, which halves the time of the compiler.
source = pathlib.Path("bpf/src/programs.c")
lines = source.read_text().splitlines(keepends=True)
others = ("host_devices.c", "tunnels.c", "hooks.c", "connects.c", "relay.c", "kubelet.c")
others += ("packet_sockets.c",)
lines = [line for line in lines if not line.rstrip('"\\n').endswith(others)]
lines.insert(0, '#pragma clang diagnostic ignored "-Wunused-function"\\n')
gate_alone = source.with_name("gate_alone.c")
gate_alone.write_text("".join(lines))
programs = [one for one in loader.PROGRAM_SET.programs if one.name == program_specs.GATE_EGRESS]
programs = dataclasses.replace(
    loader.PROGRAM_SET, source=gate_alone.name, programs=tuple(programs)
)
compiled = compiling.compile_here(programs, features.offered(programs.features))
gate_alone.unlink()

address = ipaddress.ip_address("198.18.1.1")
with GateTrial(compiled) as trial:
    for port in (9, 10):
        flow = Flow(address, 17, port)
        config = GateConfig(Mode.ENFORCE, (address,), ())
        frame = confirmation.first_frame(flow)
        of_program = trial.run(abi.CConfig(), config, frame, abi.CKubeletRemade())
        gate = GateFacts(7, "test0", Mode.ENFORCE, frozenset({address}), ())
        facts = Facts(NodeFacts(), {7: gate}, {}, route=7)
        now_ns = time.monotonic_ns()
        explained = evaluation.evaluate(facts, own_source(), flow, now_ns)
        mapped = bytes(10) + bytes((255, 255)) + address.packed
        sent = known.Sent(frame, socket=known.Socket(known.Kind.UDP, own_source().cgroup))
        state = known.State(known.Gate(Mode.ENFORCE, frozenset({mapped})))
        specified = model.evaluate(sent, state, now_ns)
        print(port, of_program[1].label, explained.reason.label, specified.counted[1].label)
test_verdicts.test_enum_is_the_twin_of_the_c_enum(Reason, "reason", "REASON_COUNT")
test_verdicts.test_every_reason_has_a_description_of_one_line()
assert "| `discard` | drop |" in reference._reasons()
"""
    )
    assert shown.splitlines() == ["9 discard discard discard", "10 node node node"]
