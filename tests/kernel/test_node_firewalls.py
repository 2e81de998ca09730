"""The rules of docs/guides/node-firewalls.md, typed as they are: without one strict steps back,
with it strict returns and the kubelet connects by the relay."""

import dataclasses
import subprocess
from collections.abc import Iterator

import pytest

from agent.lab.agent_process import AgentProcess
from agent.lab.lab import Lab, LabPod
from tests import polling
from tests.docs import blocks
from tests.docs.blocks import ROOT
from tests.kernel import cgroups, offers
from tests.kernel.cgroups import Cgroup
from tests.kernel.test_relay_conditions import RANGES
from tests.kernel.test_relay_way import PORT, PROBE, connects, is_strict, isolation

pytestmark = pytest.mark.kernel

_PAGE = ROOT / "docs" / "guides" / "node-firewalls.md"
_MARKER = "test: tests/kernel/test_node_firewalls.py"
# Pods' interfaces and the loopback are admitted, as users of such a firewall have it.
_NFT = """nft -f - <<'END'
table inet filter {{
  chain output {{
    type filter hook output priority 0; policy {output};
    ct state established,related accept
    oifname {{ "lo", "pg*" }} accept
  }}
  chain input {{
    type filter hook input priority 0; policy {input};
    iifname {{ "lo", "pg*" }} accept
  }}
}}
END
"""
_IPTABLES = """
for program in iptables ip6tables; do
  $program -A OUTPUT -m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT
  for interface in lo pg+; do $program -A OUTPUT -o $interface -j ACCEPT; done
  $program -P OUTPUT DROP
done
"""
_UFW = """
for program in iptables:ufw ip6tables:ufw6; do
  chain=${program#*:}-before-output program=${program%:*}
  $program -N $chain
  for interface in lo pg+; do $program -A $chain -o $interface -j ACCEPT; done
  $program -A $chain -m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT
  $program -A OUTPUT -j $chain
  $program -P OUTPUT DROP
done
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Firewall:
    """rules: a shell's; admits: words of the command on the page that admits the relay; chain: what
    the condition names."""

    rules: str
    admits: str
    chain: str


FIREWALLS = {
    "nftables": Firewall(
        _NFT.format(output="drop", input="accept"), "nft insert rule inet filter output", "filter"
    ),
    "stateless input": Firewall(
        _NFT.format(output="accept", input="drop"),
        "nft insert rule inet filter input",
        "inet filter input, policy drop",
    ),
    "iptables": Firewall(_IPTABLES, "iptables -I OUTPUT", "ip filter OUTPUT, policy drop"),
    "ufw": Firewall(_UFW, "iptables -I ufw-before-output", "ip filter OUTPUT, policy drop"),
}


def command(words: str) -> str:
    """The block of the page that has these words."""
    (found,) = (
        block.text
        for block in blocks.of(_PAGE, _MARKER)
        if block.language == "sh" and words in block.text
    )
    return found


def shell(script: str) -> None:
    subprocess.run(["bash", "-e", "-c", script], check=True, timeout=60)


@pytest.fixture
def kubelet() -> Iterator[Cgroup]:
    offers.need_netns_cookie()
    with cgroups.cgroup() as made:
        yield made


@pytest.fixture
def pod(lab: Lab) -> Iterator[LabPod]:
    made = lab.add_pod("web", 1)
    with made.listen(PORT) as listener:
        listener.listen(4096)  # nothing accepts
        yield made


@pytest.mark.parametrize("firewall", FIREWALLS.values(), ids=FIREWALLS)
def test_strict_steps_back_from_a_firewall_and_returns_with_the_guides_rule(
    operator: AgentProcess,
    pod: LabPod,
    kubelet: Cgroup,
    no_relays: None,
    undo_firewalls: None,
    firewall: Firewall,
) -> None:
    operator.write_manifest(pod, mode="strict", container=PROBE)
    operator.start("--kubelet", f"cgroup:{kubelet.path}", *RANGES)
    operator.wait_for("strict", is_strict)
    shell(firewall.rules)
    report = operator.wait_for("enforce", lambda found: isolation(found)[0] == "Enforced")
    assert firewall.chain in isolation(report)[1]
    # The relay receives its release some milliseconds later.
    polling.wait_until("the kubelet connects to the gate", lambda: connects(kubelet, pod))
    where = ("--run-directory", str(operator.run_directory))
    assert "Strict unavailable" in operator.run("status", "-o", "wide", *where).stdout
    shell(command(firewall.admits))
    operator.wait_for("strict again", is_strict)
    assert connects(kubelet, pod)


@pytest.fixture
def undo_firewalls(own_node: None) -> Iterator[None]:
    """A test leaves no table of nftables on its node."""
    yield
    shell("nft flush ruleset")
