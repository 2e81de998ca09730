"""Which pod the relay proxies the kubelet's connections to, where several have one address.

A redirect knows only address and port. A port that one pod declares is that pod's. A port that
several declare is shared if each request that the kubelet sends there first shows whose it is:
plain http requests, of which no two pods have the same (path, Host and headers). tcp, https and
gRPC connections show nothing before the pod responds, so their ports are ambiguous: redirected to
no pod, and open to the kubelet as in enforce. So are the ports that no pod declares, to which
redirects lead, unless all pods of the address are proxied and nothing else is ambiguous.
"""

import collections
import dataclasses
from collections.abc import Collection, Iterable, Sequence

from agent.kubelet.admitted_ports import kubelet_rules
from agent.pods.pod_state import PathTestResult, PodState
from agent.probing.answers import request_of
from agent.relay.messages import HttpRequest, SharedRequest, Sharing
from bpf import rules
from probes.engine import hooks
from probes.protocols.http_get import PROBE_CLIENT
from probes.spec.specs import PortUser

ANY_PORT = 0


@dataclasses.dataclass(frozen=True, slots=True)
class PortGrants:
    """Of one address. ports: by pod's uid, those that are its own; shared: those of several pods;
    ambiguous: by uid, those that are redirected to none."""

    ports: dict[str, tuple[int, ...]]
    shared: tuple[int, ...]
    ambiguous: dict[str, tuple[int, ...]]


def target_key(uid: str, address: str) -> str:
    """The name of a target in messages to the relay."""
    return f"{uid} {address}"


def claims_of(state: PodState) -> tuple[int, ...]:
    """Each port that the pod declares, and 0 if any port is admitted."""
    spec = state.pod.spec
    admitted = kubelet_rules(spec)
    if not admitted:
        return ()
    is_any = any((r.first_port, r.last_port) == (0, rules.MAX_PORT) for r in admitted)
    return (*sorted(spec.declared.ports), *((ANY_PORT,) if is_any else ()))


def is_sharable(address: str, port: int, pods: Sequence[PodState]) -> bool:
    """Whether the first request to this port of the address shows to which of the pods it belongs.

    To a port that none declares only redirects lead: Go's client names the request before in the
    header Referer (net/http, Client.do).
    """
    if any(state.pod.spec.errors for state in pods):
        return False
    if port == ANY_PORT:
        return True
    seen: set[bytes] = set()
    for state in pods:
        users = [user for user in state.pod.spec.port_users if user.port == port]
        sent = {_request(user, address) for user in users}
        if None in sent or not seen.isdisjoint(found := {one for one in sent if one}):
            return False
        seen |= found
    return True


def joined(
    address: str, pods: Iterable[PodState], proxied: Collection[str], eligible: Collection[str]
) -> set[str]:
    """Uids of other pods to which the relay has to proxy, too: the kubelet's connections to a port
    that they share with a proxied one all go one way.

    pods: all that have the address; proxied, eligible: uids of those to which the relay proxies in
    any case, and of those to which it may.
    """
    owners = collections.defaultdict[int, list[PodState]](list)
    for state in pods:
        for port in state.pod.spec.declared.ports:
            owners[port].append(state)
    found = set()
    for port, sharers in owners.items():
        uids = {state.pod.uid for state in sharers}
        is_needed = not uids.isdisjoint(proxied) and uids <= set(eligible)
        if is_needed and is_sharable(address, port, sharers):
            found |= uids
    return found - set(proxied)


def sharing(address: str, ports: tuple[int, ...], pods: Iterable[PodState]) -> Sharing | None:
    """What the relay distinguishes requests to shared ports by; None if there are none. pods: that
    have the address, and to which the relay proxies.

    Requests that show nothing, such as those behind a second redirect, are proxied to the pod that
    the node's route leads to, as in enforce.
    """
    if not ports:
        return None
    requests = []
    reached = []
    for state in pods:
        key = target_key(state.pod.uid, address)
        requests += [
            SharedRequest(user.port, sent, key)
            for user in state.pod.spec.port_users
            if (sent := _request(user, address))
        ]
        tested = state.sandbox_path_test
        if tested and tested.results.get(address) is PathTestResult.CONFIRMED:
            reached.append(key)
    otherwise = reached[0] if len(reached) == 1 else ""
    return Sharing(ports, tuple(requests), otherwise)


def _request(user: PortUser, address: str) -> bytes | None:
    """What the kubelet sends first; None if that does not show whose it is."""
    client = hooks.CLIENT if user.is_hook else PROBE_CLIENT
    request = request_of(user.action, address, client)
    return request.sent if isinstance(request, HttpRequest) else None


def grant(address: str, pods: Iterable[PodState], proxied: Collection[str]) -> PortGrants:
    """pods: all that have the address; proxied: uids of those to which the relay may proxy."""
    proxied = set(proxied)
    claims = {state.pod.uid: found for state in pods if (found := claims_of(state))}
    states = {state.pod.uid: state for state in pods}
    owners = collections.defaultdict[int, list[str]](list)
    for uid, ports in claims.items():
        for port in ports:
            owners[port].append(uid)
    granted = collections.defaultdict[str, list[int]](list)
    ambiguous = collections.defaultdict[str, list[int]](list)
    shared = []
    # Last: a connect that finds no port of its own is redirected by `ANY_PORT`.
    for port in sorted(owners, key=lambda port: (port == ANY_PORT, port)):
        uids = owners[port]
        sharers = [states[uid] for uid in uids]
        is_any_open = port == ANY_PORT and (ambiguous or not proxied >= claims.keys())
        if not is_any_open and len(uids) == 1 and uids[0] in proxied:
            granted[uids[0]].append(port)
        elif not is_any_open and proxied >= set(uids) and is_sharable(address, port, sharers):
            shared.append(port)
        else:
            for uid in proxied & set(uids):
                ambiguous[uid].append(port)
    return PortGrants(
        {uid: tuple(ports) for uid, ports in granted.items()},
        tuple(shared),
        {uid: tuple(ports) for uid, ports in ambiguous.items()},
    )
