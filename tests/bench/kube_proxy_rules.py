"""nftables rules as kube-proxy 1.36 has them for ClusterIP services, to compare connections with.

Written from its design (KEP-3866 and pkg/proxy/nftables): a table of each family, a verdict map
from service address to a chain of the service, and in that chain a random choice among its
endpoints. Without --cluster-cidr, and with node ports on the primary address: its defaults.
"""

import subprocess
from collections.abc import Iterable

from agent.services.client.v1alpha1 import endpoints_pb2 as pb

_FAMILIES = (("ip", "ipv4_addr", "198.18.96.0/19"), ("ip6", "ipv6_addr", "fd00:18:96::/112"))
_TABLE = "kube-proxy"


def install(services: Iterable[pb.ServiceEndpoints]) -> None:
    """Write both tables in one transaction."""
    services = list(services)
    _apply("".join(_table(services, *family) for family in _FAMILIES))


def remove() -> None:
    """Delete both tables."""
    _apply("".join(f"delete table {ip} {_TABLE}\n" for ip, *_ in _FAMILIES))


def _apply(script: str) -> None:
    # A chain for each service takes nft seconds, and a minute beside other load.
    subprocess.run(["nft", "-f", "-"], input=script, text=True, check=True, timeout=300)


def _table(services: list[pb.ServiceEndpoints], ip: str, kind: str, network: str) -> str:
    lines = [_frame(ip, kind, network)]
    cluster_ips, dispatch, hairpins = [], [], set()
    for service in services:
        (port,) = service.ports
        (address,) = (one for one in service.cluster_ips if (":" in one) == (ip == "ip6"))
        endpoints = [one for one in port.endpoints if (":" in one.address) == (ip == "ip6")]
        chain = f"service-{service.namespace}/{service.name}/tcp/"
        choices = ", ".join(
            f"{number} : {one.address} . {one.port}" for number, one in enumerate(endpoints)
        )
        lines.append(f"add chain {ip} {_TABLE} {chain}")
        lines.append(
            f"add rule {ip} {_TABLE} {chain} meta l4proto tcp dnat {ip} addr . port to "
            f"numgen random mod {len(endpoints)} map {{ {choices} }}"
        )
        cluster_ips.append(address)
        dispatch.append(f"{address} . tcp . {port.port} : goto {chain}")
        hairpins |= {f"{one.address} . {one.address} . tcp . {one.port}" for one in endpoints}
    for name, elements in (
        ("cluster-ips", cluster_ips),
        ("service-ips", dispatch),
        ("hairpin-connections", hairpins),
    ):
        lines.append(f"add element {ip} {_TABLE} {name} {{ {', '.join(elements)} }}")
    return "".join(f"{line}\n" for line in lines)


def _frame(ip: str, kind: str, network: str) -> str:
    address = f"{kind} . inet_proto . inet_service"
    destination = f"{ip} daddr . meta l4proto . th dport"
    return f"""table {ip} {_TABLE} {{
  set cluster-ips {{ type {kind}; }}
  set nodeport-ips {{ type {kind}; }}
  set hairpin-connections {{ type {kind} . {address}; }}
  map firewall-ips {{ type {address} : verdict; }}
  map no-endpoint-services {{ type {address} : verdict; }}
  map no-endpoint-nodeports {{ type inet_proto . inet_service : verdict; }}
  map service-ips {{ type {address} : verdict; }}
  map service-nodeports {{ type inet_proto . inet_service : verdict; }}
  chain firewall-check {{ {destination} vmap @firewall-ips
  }}
  chain service-endpoints-check {{ {destination} vmap @no-endpoint-services
  }}
  chain nodeport-endpoints-check {{
    {ip} daddr @nodeport-ips meta l4proto . th dport vmap @no-endpoint-nodeports
  }}
  chain cluster-ips-check {{
    {ip} daddr @cluster-ips reject
    {ip} daddr {{ {network} }} drop
  }}
  chain services {{
    {destination} vmap @service-ips
    {ip} daddr @nodeport-ips meta l4proto . th dport vmap @service-nodeports
  }}
  chain masquerading {{
    meta mark & 0x4000 != 0 meta mark set meta mark ^ 0x4000 masquerade fully-random
    ct status & dnat == dnat {ip} saddr . {destination} @hairpin-connections \
masquerade fully-random
  }}
  chain filter-prerouting-pre-dnat {{
    type filter hook prerouting priority -110;
    ct state new jump firewall-check
  }}
  chain filter-output-pre-dnat {{
    type filter hook output priority -110;
    ct state new jump firewall-check
  }}
  chain filter-input {{
    type filter hook input priority 0;
    ct state new jump nodeport-endpoints-check
    ct state new jump service-endpoints-check
  }}
  chain filter-forward {{
    type filter hook forward priority 0;
    ct state new jump service-endpoints-check
    ct state new jump cluster-ips-check
  }}
  chain filter-output {{
    type filter hook output priority 0;
    ct state new jump service-endpoints-check
    ct state new jump cluster-ips-check
  }}
  chain nat-prerouting {{
    type nat hook prerouting priority -100;
    jump services
  }}
  chain nat-output {{
    type nat hook output priority -100;
    jump services
  }}
  chain nat-postrouting {{
    type nat hook postrouting priority 100;
    jump masquerading
  }}
}}
"""
