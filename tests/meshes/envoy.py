"""A real Envoy as a pod's proxy in STRICT, configured after what istiod sends to a sidecar.

Inbound connections need TLS with a client certificate and the ALPN `istio`; the application then
sees 127.0.0.6 or ::6. Outbound connections to pods of the mesh get mTLS, others pass as they are.
"""

import dataclasses
import json
import pathlib
import subprocess
from typing import Any

_TYPES = "type.googleapis.com/envoy.extensions"
_MESH = (("198.18.1.0", 24), ("fd00:18:0:1::", 64))
"""Addresses of the lab's pods."""
ADMIN, STATUS, HEALTH, STATISTICS = 15000, 15020, 15021, 15090


@dataclasses.dataclass(frozen=True, slots=True)
class Identity:
    """Certificate and key of all workloads, and their authority's certificate, in PEM."""

    authority: str
    certificate: str
    key: str


def make_identity(folder: pathlib.Path) -> Identity:
    """By openssl, for three days."""

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    openssl(
        *("req", "-x509", *curve, "-days", "3", "-subj", "/CN=mesh authority"),
        *("-keyout", "authority.key", "-out", "authority.pem"),
    )
    openssl(
        *("req", *curve, "-subj", "/CN=workload"),
        *("-keyout", "workload.key", "-out", "workload.csr"),
    )
    (folder / "extensions").write_text(
        "subjectAltName=URI:spiffe://cluster.local/ns/demo/sa/default\n"
    )
    openssl(
        *("x509", "-req", "-in", "workload.csr", "-days", "3", "-extfile", "extensions"),
        *("-CA", "authority.pem", "-CAkey", "authority.key", "-CAcreateserial"),
        *("-out", "workload.pem"),
    )
    names = ("authority.pem", "workload.pem", "workload.key")
    return Identity(*((folder / name).read_text() for name in names))


@dataclasses.dataclass(frozen=True, slots=True)
class Ports:
    """Where an Envoy listens for redirected connections."""

    inbound: int
    outbound: int = 15001


def arguments(
    identity: Identity, addresses: tuple[str, str], ports: Ports, *, is_transparent: bool = False
) -> list[str]:
    """Of the program. addresses: the pod's, IPv4 and IPv6; is_transparent: for TPROXY."""
    content = json.dumps(_bootstrap(identity, addresses, ports, is_transparent))
    fixed = ("--concurrency", "1", "--use-dynamic-base-id", "--log-level", "error")
    return ["--config-yaml", content, *fixed]


def _bootstrap(
    identity: Identity, addresses: tuple[str, str], ports: Ports, is_transparent: bool
) -> dict[str, Any]:
    own = [_prefix(addresses[0], 32), _prefix(addresses[1], 128)]
    inbound = [
        {
            "filter_chain_match": {
                "prefix_ranges": [prefix],
                "transport_protocol": "tls",
                "application_protocols": ["istio"],
            },
            "transport_socket": _tls(identity, is_server=True),
            "filters": _passed_to(cluster),
        }
        for prefix, cluster in zip(own, ("inbound-ipv4", "inbound-ipv6"), strict=True)
    ]
    mesh = [_prefix(*network) for network in _MESH]
    outbound = [
        {"filter_chain_match": {"prefix_ranges": own}, "filters": _passed_to("passthrough")},
        {"filter_chain_match": {"prefix_ranges": mesh}, "filters": _passed_to("mesh")},
    ]
    original = [_extension("listener.original_dst", "filters", "OriginalDst")]
    return {
        "admin": {"address": _address("127.0.0.1", ADMIN)},
        "static_resources": {
            "listeners": [
                {
                    "name": "inbound",
                    "address": _address("::", ports.inbound),
                    **({"transparent": True} if is_transparent else {}),
                    "listener_filters": [
                        *original,
                        _extension("listener.tls_inspector", "filters", "TlsInspector"),
                    ],
                    "listener_filters_timeout": "1s",
                    "continue_on_listener_filters_timeout": True,
                    "filter_chains": inbound,
                },
                {
                    "name": "outbound",
                    "address": _address("::", ports.outbound),
                    "listener_filters": original,
                    "filter_chains": outbound,
                    "default_filter_chain": {"filters": _passed_to("passthrough")},
                },
                _served("health", HEALTH, "/healthz/ready", "agent"),
                _served("statistics", STATISTICS, "/stats/prometheus", "admin"),
            ],
            "clusters": [
                _original_destination("inbound-ipv4", source="127.0.0.6"),
                _original_destination("inbound-ipv6", source="::6"),
                _original_destination("mesh", tls=_tls(identity, is_server=False)),
                _original_destination("passthrough"),
                _local("agent", STATUS),
                _local("admin", ADMIN),
            ],
        },
    }


def _prefix(address: str, length: int) -> dict[str, Any]:
    return {"address_prefix": address, "prefix_len": length}


def _address(host: str, port: int) -> dict[str, Any]:
    is_dual = {"ipv4_compat": True} if host == "::" else {}
    return {"socket_address": {"address": host, "port_value": port, **is_dual}}


def _extension(name: str, kind: str, message: str, **fields: Any) -> dict[str, Any]:
    return {
        "name": f"envoy.{kind}.{name}",
        "typed_config": {"@type": f"{_TYPES}.{kind}.{name}.v3.{message}", **fields},
    }


def _tls(identity: Identity, *, is_server: bool) -> dict[str, Any]:
    context = {
        "alpn_protocols": ["istio"],
        "tls_certificates": [
            {
                "certificate_chain": {"inline_string": identity.certificate},
                "private_key": {"inline_string": identity.key},
            }
        ],
        "validation_context": {"trusted_ca": {"inline_string": identity.authority}},
    }
    message = "DownstreamTlsContext" if is_server else "UpstreamTlsContext"
    required = {"require_client_certificate": True} if is_server else {}
    return _extension("tls", "transport_sockets", message, common_tls_context=context, **required)


def _passed_to(cluster: str) -> list[dict[str, Any]]:
    fields = {"stat_prefix": cluster, "cluster": cluster}
    return [_extension("network.tcp_proxy", "filters", "TcpProxy", **fields)]


def _served(name: str, port: int, path: str, cluster: str) -> dict[str, Any]:
    """A listener that serves one path."""
    manager = _extension(
        "network.http_connection_manager",
        "filters",
        "HttpConnectionManager",
        stat_prefix=name,
        route_config={
            "virtual_hosts": [
                {
                    "name": name,
                    "domains": ["*"],
                    "routes": [{"match": {"path": path}, "route": {"cluster": cluster}}],
                }
            ]
        },
        http_filters=[_extension("http.router", "filters", "Router")],
    )
    return {
        "name": name,
        "address": _address("::", port),
        "filter_chains": [{"filters": [manager]}],
    }


def _original_destination(
    name: str, *, source: str = "", tls: dict[str, Any] | None = None
) -> dict[str, Any]:
    bound = {"source_address": {"address": source, "port_value": 0}}
    return {
        "name": name,
        "type": "ORIGINAL_DST",
        "lb_policy": "CLUSTER_PROVIDED",
        "connect_timeout": "1s",
        **({"upstream_bind_config": bound} if source else {}),
        **({"transport_socket": tls} if tls else {}),
    }


def _local(name: str, port: int) -> dict[str, Any]:
    endpoint = {"endpoint": {"address": _address("127.0.0.1", port)}}
    return {
        "name": name,
        "type": "STATIC",
        "connect_timeout": "1s",
        "load_assignment": {"cluster_name": name, "endpoints": [{"lb_endpoints": [endpoint]}]},
    }
