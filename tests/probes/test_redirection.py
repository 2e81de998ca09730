"""Probes in pods whose own rules redirect connections, as those of meshes do."""

import asyncio
import contextlib
import socket
import subprocess
from collections.abc import Iterator

import pytest

from probes import redirection
from probes.engine import prober
from probes.redirection import Dropped, InnerTries, InnerWay, Redirection
from probes.results import ProbeOutcome, ProbeResult
from probes.spec.specs import HttpGet, Probe, TcpSocket
from tests import redirected
from tests.probes import servers
from tests.probes.conftest import V4, V6, Sandbox, sandbox_netns
from tests.probes.single_probe import OK, run_probe

pytestmark = pytest.mark.kernel

APP = 8080

OWN_PORT = """
table inet own {
  chain out {
    type nat hook output priority -100
    tcp dport 80 redirect to :8080
  }
}
"""


@pytest.fixture
def proxy(sandbox: Sandbox) -> Iterator[Sandbox]:
    with redirected.proxy(sandbox.netns):
        yield sandbox


@pytest.fixture(params=["nft", "iptables"])
def consul(request: pytest.FixtureRequest, proxy: Sandbox) -> Sandbox:
    """A pod with Consul's rules, which exempt the proxy's user, and not the loopback."""
    if request.param == "nft":
        redirected.nft(proxy.netns, redirected.CONSUL)
    else:
        for program in ("iptables", "ip6tables"):
            for rule in redirected.CONSUL_IPTABLES:
                rule = rule if program == "iptables" else rule.replace("127.0.0.1/32", "::1/128")
                redirected.run(proxy.netns, program, "-t", "nat", *rule.split())
    return proxy


async def probe(sandbox: Sandbox, *addresses: str, port: int = APP) -> ProbeOutcome:
    return await run_probe(sandbox, TcpSocket(port), *addresses)


@pytest.mark.parametrize("address", [V4, V6])
async def test_dead_application_behind_a_proxy_is_not_healthy(
    consul: Sandbox, address: str
) -> None:
    outcome = await probe(consul, address)
    assert outcome.result is ProbeResult.FAILURE
    assert outcome.message.endswith("connect: connection refused")


@pytest.mark.parametrize("address", [V4, V6])
async def test_living_application_behind_a_proxy_is_healthy(consul: Sandbox, address: str) -> None:
    with consul.listen(address, APP):
        assert (await probe(consul, address)).result is ProbeResult.SUCCESS


@pytest.mark.parametrize("address", [V4, V6])
async def test_redirected_probe_is_no_verdict_where_no_user_is_exempt(
    proxy: Sandbox, address: str
) -> None:
    redirected.nft(proxy.netns, redirected.EXEMPTS_NOBODY)
    for handler in (TcpSocket(APP), HttpGet(APP)):
        outcome = await run_probe(proxy, handler, address)
        assert outcome.result is ProbeResult.UNKNOWN
        assert outcome.is_redirected
        assert outcome.error
        assert outcome.message == (
            "Redirected to port 15001 (a mesh with Envoy, user 5995), which shows nothing of the "
            "application."
        )


async def test_proxy_of_root_is_noticed_too(sandbox: Sandbox) -> None:
    """No other user is known that could be exempt."""
    redirected.nft(sandbox.netns, redirected.CONSUL)
    with sandbox.listen("127.0.0.1", redirected.PROXY):
        outcome = await probe(sandbox, V4)
    assert outcome.message.startswith("Redirected to port 15001 (a mesh with Envoy, user 0)")


async def test_destination_that_rules_replace_is_noticed(proxy: Sandbox) -> None:
    """DNAT, to an address of the pod instead of 127.0.0.1."""
    to_proxy = f"ip daddr {V4} tcp dport != {redirected.PROXY} dnat ip to {V4}:{redirected.PROXY}"
    rules = redirected.EXEMPTS_NOBODY.replace(
        f"meta l4proto tcp redirect to :{redirected.PROXY}", to_proxy
    )
    redirected.nft(proxy.netns, rules)
    assert (await probe(proxy, V4)).is_redirected


async def test_rules_that_come_later_are_noticed_at_the_first_failure(proxy: Sandbox) -> None:
    """The last connection was the application's, so this one is not looked up before it fails."""
    running = prober.Prober(asyncio.get_running_loop())
    plan = prober.plan(Probe(HttpGet(APP, path="/x")), [V4])
    try:
        async with servers.serving(proxy.listen(V4, APP), servers.saying(OK)):
            assert (await once(running, plan, proxy)).result is ProbeResult.SUCCESS
        redirected.nft(proxy.netns, redirected.EXEMPTS_NOBODY)
        failing = prober.plan(Probe(HttpGet(APP, path="/fail")), [V4])
        assert (await once(running, failing, proxy)).is_redirected
    finally:
        running.close()


async def once(running: prober.Prober, plan: prober.ProbePlan, pod: Sandbox) -> ProbeOutcome:
    outcome: asyncio.Future[ProbeOutcome] = running.loop.create_future()
    running.start(plan, pod.netns, outcome.set_result)
    return await outcome


async def test_application_may_be_at_the_address_that_is_redirected(proxy: Sandbox) -> None:
    """The other family rejects; yet that is no failure of the pod."""
    redirected.nft(
        proxy.netns,
        redirected.EXEMPTS_NOBODY.replace(
            "meta l4proto tcp redirect", "ip daddr 198.18.0.1 tcp dport 1-65535 redirect"
        ),
    )
    outcome = await probe(proxy, V4, V6)
    assert (outcome.result, outcome.is_redirected) == (ProbeResult.UNKNOWN, True)


async def test_rules_that_exempt_the_loopback_redirect_nothing(proxy: Sandbox) -> None:
    redirected.nft(proxy.netns, redirected.ISTIO)
    outcome = await probe(proxy, V4)
    assert outcome.message == "dial tcp 198.18.0.1:8080: connect: connection refused"


async def test_port_that_the_pod_itself_redirects_is_the_application(sandbox: Sandbox) -> None:
    """Containers without rights serve port 80 like this."""
    redirected.nft(sandbox.netns, OWN_PORT)
    with sandbox.listen("0.0.0.0", APP):
        assert (await probe(sandbox, V4, port=80)).result is ProbeResult.SUCCESS


@pytest.fixture
def transparent(sandbox: Sandbox) -> Iterator[Sandbox]:
    with redirected.proxy(sandbox.netns, is_transparent=True):
        yield sandbox


@pytest.mark.parametrize("address", [V4, V6])
@pytest.mark.parametrize("is_alive", [False, True], ids=["dead", "alive"])
async def test_transparent_proxy_of_one_port_is_noticed(
    transparent: Sandbox, address: str, *, is_alive: bool
) -> None:
    """TPROXY of what enters by the loopback: the accepted socket has the dialled address."""
    redirected.nft(transparent.netns, redirected.tproxy(str(APP)))
    with contextlib.ExitStack() as stack:
        if is_alive:
            stack.enter_context(transparent.listen(address, APP))
        outcome = await probe(transparent, address)
    assert (outcome.result, outcome.is_redirected) == (ProbeResult.UNKNOWN, True)
    assert outcome.message.startswith("Redirected to port 15001 (a mesh with Envoy, user 0)")


def test_transparent_proxy_of_all_ports_is_noticed(transparent: Sandbox) -> None:
    redirected.nft(transparent.netns, redirected.tproxy(redirected.ALL_PORTS))
    way = InnerWay(Redirection(redirected.PROXY, 0, "a mesh with Envoy"), None)
    found = redirection.find_inner_ways(transparent.netns, (V4, V6), {})
    assert found == InnerTries({V4: way, V6: way}, [])


async def test_server_that_is_transparent_itself_is_the_application(transparent: Sandbox) -> None:
    assert (await probe(transparent, V4, port=redirected.PROXY)).result is ProbeResult.SUCCESS


@contextlib.contextmanager
def elsewhere(sandbox: Sandbox) -> Iterator[tuple[str, int]]:
    """Address and port of a server in another namespace, to which the sandbox has a route."""
    with sandbox_netns() as other:
        for command in (
            f"ip link add far netns {sandbox.pid} type veth peer name near netns {other.pid}",
            f"ip -n {sandbox.pid} addr add 198.18.9.1/30 dev far",
            f"ip -n {sandbox.pid} link set far up",
            f"ip -n {other.pid} addr add 198.18.9.2/30 dev near",
            f"ip -n {other.pid} link set near up",
            f"ip -n {other.pid} addr del {V4}/32 dev lo",
            f"ip -n {other.pid} route add {V4} via 198.18.9.1",
        ):
            subprocess.run(_by_pid(command), check=True)
        with other.listen("198.18.9.2") as listener:
            yield listener.getsockname()


def _by_pid(command: str) -> list[str]:
    """`ip -n` takes names only."""
    words = command.split()
    if words[1] != "-n":
        return words
    return ["nsenter", f"--net=/proc/{words[2]}/ns/net", "ip", *words[3:]]


@pytest.mark.parametrize("is_alive", [False, True], ids=["dead", "alive"])
async def test_destination_in_another_network_namespace_is_noticed(
    sandbox: Sandbox, *, is_alive: bool
) -> None:
    """By DNAT, as for a proxy in a namespace of its own."""
    with elsewhere(sandbox) as (host, port), contextlib.ExitStack() as stack:
        redirected.nft(
            sandbox.netns,
            "table ip own { chain out { type nat hook output priority -100; "
            f"tcp dport {APP} dnat to {host}:{port}; }}; }}",
        )
        if is_alive:
            stack.enter_context(sandbox.listen(V4, APP))
        outcome = await probe(sandbox, V4)
    assert (outcome.result, outcome.is_redirected) == (ProbeResult.UNKNOWN, True)
    assert outcome.message == ("Redirected out of the pod, which shows nothing of the application.")


async def test_source_that_rules_replace_is_no_redirection(sandbox: Sandbox) -> None:
    """The other end is in the pod, and connected to another address than the probe's."""
    redirected.nft(
        sandbox.netns,
        "table ip own { chain post { type nat hook postrouting priority 100; "
        f"oifname lo tcp dport {APP} snat to 127.0.0.9; }}; }}",
    )
    with sandbox.listen(V4, APP) as listener:
        assert (await probe(sandbox, V4)).result is ProbeResult.SUCCESS
        accepted, peer = listener.accept()
        accepted.close()
    assert peer[0] == "127.0.0.9"


async def test_server_with_syn_cookies_is_no_redirection(sandbox: Sandbox) -> None:
    """The pod has no socket for a connection that is open already; with a full queue for longer."""
    sandbox.netns.set_sysctl("ipv4/tcp_syncookies", "2")
    with sandbox.listen(V4, APP, backlog=0), contextlib.ExitStack() as held:
        for _ in range(3):
            outcome = await probe(sandbox, V4)
            assert not outcome.is_redirected
            client = held.enter_context(sandbox.netns.socket(socket.AF_INET, socket.SOCK_STREAM))
            client.connect_ex((V4, APP))


def test_inner_way_names_the_user_that_is_exempt(consul: Sandbox) -> None:
    found = redirection.find_inner_ways(consul.netns, (V4, V6), {})
    mesh = Redirection(redirected.PROXY, redirected.USER, "a mesh with Envoy")
    assert found.ways == {V4: InnerWay(mesh, redirected.USER), V6: InnerWay(mesh, redirected.USER)}


def test_inner_way_of_rules_without_exemption_has_no_user(proxy: Sandbox) -> None:
    redirected.nft(proxy.netns, redirected.EXEMPTS_NOBODY)
    found = redirection.find_inner_ways(proxy.netns, (V4,), {})
    assert found.ways == {
        V4: InnerWay(Redirection(redirected.PROXY, redirected.USER, "a mesh with Envoy"), None)
    }


def test_inner_way_is_free_without_rules_or_with_an_exemption(proxy: Sandbox) -> None:
    assert redirection.find_inner_ways(proxy.netns, (V4, V6), {}) == InnerTries({}, [])
    redirected.nft(proxy.netns, redirected.ISTIO)
    assert redirection.find_inner_ways(proxy.netns, (V4, V6), {}) == InnerTries({}, [])


def test_socket_of_another_user_leaves_the_thread_as_it_was(sandbox: Sandbox) -> None:
    made = sandbox.netns.bare_socket(socket.AF_INET, socket.SOCK_STREAM, redirected.USER)
    made.close()
    with open("/proc/thread-self/status", encoding="ascii") as stream:
        (users,) = (line for line in stream if line.startswith("Uid:"))
    assert users.split()[1:] == ["0", "0", "0", "0"]


def silent(sandbox: Sandbox, address: str) -> list[str]:
    return redirection.find_inner_ways(sandbox.netns, [address], {}).silent


EGRESS_LOCK_DOWN = """
table inet fw {
  chain o {
    type filter hook output priority 0; policy drop
    ct state established,related accept
  }
}
"""


@pytest.mark.parametrize("address", [V4, V6])
def test_firewall_in_the_pod_that_drops_what_comes_from_inside_is_noticed(
    sandbox: Sandbox, address: str
) -> None:
    with sandbox.listen(address, APP):
        assert silent(sandbox, address) == []
        assert redirection.find_dropped(sandbox.netns, [address]) == {}
        redirected.nft(sandbox.netns, EGRESS_LOCK_DOWN)
        assert silent(sandbox, address) == [address]
        found = redirection.find_dropped(sandbox.netns, [address])
    assert found == {address: InnerWay(Dropped(APP), None)}
    # Without a server nothing is known.
    assert redirection.find_dropped(sandbox.netns, [address]) == {}


def test_firewall_in_the_pod_that_admits_the_servers_port_is_no_problem(sandbox: Sandbox) -> None:
    rules = EGRESS_LOCK_DOWN.replace("ct state", f"tcp dport {APP} accept\n    ct state")
    redirected.nft(sandbox.netns, rules)
    with sandbox.listen(V4, APP):
        assert silent(sandbox, V4) == [V4]
        assert redirection.find_dropped(sandbox.netns, [V4]) == {}
