"""The nftables table beside IPVS, which only balances: masquerading, rejections, source ranges."""

import collections
import socket
from collections.abc import Mapping, Sequence

from agent.services.proxy.frontends import Frontend
from bpf.abi import IPNetwork
from bpf.services.tables import ServiceAddress

TABLE = "podgate-ipvs"

_IP = {4: "ip", 6: "ip6"}
_PROTOCOLS = {socket.IPPROTO_TCP: "tcp", socket.IPPROTO_UDP: "udp", socket.IPPROTO_SCTP: "sctp"}

# The table without services; lines with a # are for each family. 0x4000 marks packets to be
# masqueraded, as with kube-proxy. IPVS works at the hooks `input` and `output`, after these chains,
# where packets to services are local. The node reaches a service from the service's own address, so
# that is masqueraded; with pod networks, also what other sources send to cluster IPs.
_FRAME = """
  map sources# { type ipv#_addr . inet_proto . inet_service : verdict; }
  map outside# { type ipv#_addr . inet_proto . inet_service : verdict; }
  map no_endpoints# { type ipv#_addr . inet_proto . inet_service : verdict; }
  set cluster_ips# { type ipv#_addr; }
  set own# { type ipv#_addr . ipv#_addr; }
  set hairpin# { type ipv#_addr . ipv#_addr; }
  set pods# { type ipv#_addr; flags interval; }
  chain mark_traffic {
    meta mark set meta mark | 0x4000
  }
  chain reject_traffic {
    meta l4proto tcp reject with tcp reset
    reject
  }
  chain from_node {
    IP daddr . meta l4proto . th dport vmap @no_endpoints#
    IP daddr @cluster_ips# IP saddr != @pods# meta mark set meta mark | 0x4000
  }
  chain input {
    type filter hook input priority -110; policy accept;
    ct state != new accept
    IP daddr . meta l4proto . th dport vmap @sources#
    IP saddr @pods# goto from_node
    IP daddr . meta l4proto . th dport vmap @outside#
    goto from_node
  }
  chain output {
    type filter hook output priority -110; policy accept;
    ct state != new accept
    IP daddr . meta l4proto . th dport vmap @sources#
    IP saddr . IP daddr @own# meta mark set meta mark | 0x4000
    goto from_node
  }
  chain postrouting {
    type nat hook postrouting priority 100; policy accept;
    meta mark & 0x4000 == 0x4000 meta mark set meta mark & 0xffffbfff masquerade fully-random
    IP saddr . IP daddr @hairpin# masquerade fully-random
  }
"""


def ruleset_of(
    frontends: Mapping[ServiceAddress, Frontend], pod_networks: Sequence[IPNetwork]
) -> str:
    """A script that replaces the whole table."""
    elements: dict[str, dict[str, None]] = collections.defaultdict(dict)
    chains: list[str] = []
    for network in pod_networks:
        elements[f"pods{network.version}"][str(network)] = None
    for address, frontend in frontends.items():
        version, at = address.address.version, str(address.address)
        key = f"{at} . {_PROTOCOLS[address.protocol]} . {address.port}"
        rejection = "drop" if frontend.drops else "goto reject_traffic"
        elements[f"own{version}"][f"{at} . {at}"] = None
        for local in frontend.local:
            elements[f"hairpin{version}"][f"{local.address} . {local.address}"] = None
        if frontend.sources:
            name = f"sources-{len(chains)}"
            admitted = (f"{_IP[version]} saddr {network} return" for network in frontend.sources)
            rules = "\n".join((*admitted, "drop"))
            chains.append(f"chain {name} {{\n{rules}\n}}")
            elements[f"sources{version}"][f"{key} : jump {name}"] = None
        if not frontend.endpoints:
            elements[f"no_endpoints{version}"][f"{key} : {rejection}"] = None
        if frontend.is_external:
            verdict = "accept" if frontend.preserves_client_ip else "goto mark_traffic"
            verdict = verdict if frontend.outside else rejection
            elements[f"outside{version}"][f"{key} : {verdict}"] = None
        elif f"pods{version}" in elements:
            elements[f"cluster_ips{version}"][at] = None
    lines = [
        f"add table inet {TABLE}",
        f"delete table inet {TABLE}",
        f"table inet {TABLE} {{",
        *(
            line.replace("IP", ip).replace("#", str(version))
            for line in _FRAME.splitlines()
            for version, ip in (_IP.items() if "#" in line else ((0, ""),))
        ),
        *chains,
        "}",
        *(
            f"add element inet {TABLE} {container} {{ {', '.join(own)} }}"
            for container, own in elements.items()
        ),
    ]
    return "".join(f"{line}\n" for line in lines)
