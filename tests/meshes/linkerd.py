"""Linkerd: its own rules and proxy, which rejects clients without an identity of the mesh.

There is no control plane: its identity service is a stand-in in each pod
(`tests.meshes.linkerd_identity`), without a policy controller nothing authorizes probes, and
without a destination service the proxy opens no mTLS.
"""

import pathlib
import subprocess
import sys

from agent.lab.lab import LabPod
from tests.meshes import linkerd_identity, programs, running
from tests.meshes.programs import LINKERD_INIT, LINKERD_PROXY
from tests.meshes.running import MeshProcess, MeshProcesses

PROGRAMS = (LINKERD_INIT, LINKERD_PROXY)
PORTS = (4140, 4143, 4190, 4191)
_OUTBOUND, _INBOUND, _CONTROL, _ADMIN = PORTS
_USER = 2102
_NAME = "default.demo.serviceaccount.identity.linkerd.cluster.local"


def start(processes: MeshProcesses, pod: LabPod) -> MeshProcess:
    """The rules, and the proxy; returns when it listens."""
    running.run_in(
        pod,
        programs.path(LINKERD_INIT),
        *("--incoming-proxy-port", str(_INBOUND), "--outgoing-proxy-port", str(_OUTBOUND)),
        *("--proxy-uid", str(_USER), "--iptables-mode", "nft", "--ipv6=true"),
        *("--inbound-ports-to-ignore", f"{_CONTROL},{_ADMIN},4567,4568"),
        *("--outbound-ports-to-ignore", "4567,4568"),
    )
    folder = processes.folder / f"linkerd-{pod.name}"
    folder.mkdir(mode=0o755)
    _make_identity(folder)
    identity = processes.start(
        pod, [sys.executable, "-m", "tests.meshes.linkerd_identity", str(folder / "leaf.der")]
    )
    running.wait_for_listener(pod, linkerd_identity.PORT, identity)
    proxy = processes.start(
        pod, [programs.path(LINKERD_PROXY)], user=_USER, environment=_environment(pod, folder)
    )
    running.wait_for_listener(pod, _INBOUND, proxy)
    return proxy


def _make_identity(folder: pathlib.Path) -> None:
    """An authority, and a key with its request, which the stand-in answers by a certificate that is
    made here."""

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    openssl(
        *("req", "-x509", *key, "-days", "3", "-subj", "/CN=root.linkerd.cluster.local"),
        *("-keyout", "authority.key", "-out", "authority.pem"),
    )
    openssl(
        *("req", *key, "-subj", f"/CN={_NAME}", "-addext", f"subjectAltName=DNS:{_NAME}"),
        *("-keyout", "workload.key", "-out", "workload.csr"),
    )
    openssl("req", "-in", "workload.csr", "-outform", "DER", "-out", "csr.der")
    openssl(
        *("pkcs8", "-topk8", "-nocrypt", "-in", "workload.key", "-outform", "DER"),
        *("-out", "key.p8"),
    )
    (folder / "extensions").write_text(
        f"subjectAltName=DNS:{_NAME}\nextendedKeyUsage=serverAuth,clientAuth\n"
    )
    openssl(
        *("x509", "-req", "-in", "workload.csr", "-days", "3", "-extfile", "extensions"),
        *("-CA", "authority.pem", "-CAkey", "authority.key", "-CAcreateserial"),
        *("-outform", "DER", "-out", "leaf.der"),
    )
    (folder / "token").write_text("token")
    for file in folder.iterdir():
        file.chmod(0o644)


def _environment(pod: LabPod, folder: pathlib.Path) -> dict[str, str]:
    service = f"127.0.0.1:{linkerd_identity.PORT}"
    settings = {
        "LOG": "warn",
        "CORES": "1",
        "INBOUND_LISTEN_ADDR": f"[::]:{_INBOUND}",
        "OUTBOUND_LISTEN_ADDRS": f"127.0.0.1:{_OUTBOUND},[::1]:{_OUTBOUND}",
        "CONTROL_LISTEN_ADDR": f"[::]:{_CONTROL}",
        "ADMIN_LISTEN_ADDR": f"[::]:{_ADMIN}",
        "IDENTITY_DIR": str(folder),
        "IDENTITY_TRUST_ANCHORS": (folder / "authority.pem").read_text(),
        "IDENTITY_TOKEN_FILE": str(folder / "token"),
        "IDENTITY_SERVER_ID": _NAME,
        "IDENTITY_SERVER_NAME": _NAME,
        "IDENTITY_LOCAL_NAME": _NAME,
        "IDENTITY_SVC_ADDR": service,
        "POLICY_SVC_ADDR": service,
        "DESTINATION_SVC_ADDR": service,
        "POLICY_WORKLOAD": f"demo:{pod.name}",
        "POLICY_CLUSTER_NETWORKS": "198.18.0.0/16,fd00:18::/32",
        "INBOUND_IPS": f"{pod.ipv4},{pod.ipv6}",
        "INBOUND_DEFAULT_POLICY": "all-authenticated",
        "DESTINATION_PROFILE_NETWORKS": "203.0.113.0/24",
    }
    return {f"LINKERD2_PROXY_{name}": value for name, value in settings.items()}
