"""etcd, API server, controller manager and scheduler, of given binaries."""

import pathlib
import shutil
import ssl
from collections.abc import Sequence
from http.client import HTTPException

from tests import polling
from tests.cluster.api import Api, ApiError
from tests.cluster.daemons import Daemon
from tests.cluster.pki import Pki

PROGRAMS = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet")
# As in most clusters the API server's service has this port, and here the server itself, too: the
# service's address is one of the node's, so pods reach it without a service proxy.
PORT = 443
SERVICE_ADDRESS = "198.18.200.1"
SERVICE_NETWORKS = ("198.18.200.0/24", "fd00:18:200::/112")
_ETCD = "http://127.0.0.1:2379"
_PEERS = "http://127.0.0.1:2380"
_NAMES = ("kubernetes", "kubernetes.default", "kubernetes.default.svc", "localhost")


class ControlPlane:
    """Four daemons on the node's network. `start` them in order; their cgroups' end ends them."""

    def __init__(
        self,
        binaries: pathlib.Path,
        directory: pathlib.Path,
        cgroup: pathlib.Path,
        address: str,
        *,
        pod_networks: Sequence[str] = (),
    ) -> None:
        """directory: empty; cgroup: the directory of one, for those of the daemons; address: its
        own, for clients; pod_networks: of an address family each, from which each node gets a part;
        without any the network plugin has its own."""
        self.pki = Pki(_made(directory / "pki"))
        self.server = f"https://{address}:{PORT}"
        self._logs = _made(directory / "logs")
        self._cgroup = cgroup
        self._sign(address)
        self.api = Api(address, PORT, self.pki, "admin")
        self.etcd = self._daemon(
            _etcd(binaries),
            f"--data-dir={directory / 'etcd'}",
            f"--listen-client-urls={_ETCD}",
            f"--advertise-client-urls={_ETCD}",
            f"--listen-peer-urls={_PEERS}",
        )
        self.api_server = self._daemon(
            str(binaries / "kube-apiserver"), *self._api_server_flags(address)
        )
        self.controller_manager = self._daemon(
            str(binaries / "kube-controller-manager"),
            f"--kubeconfig={self.kubeconfig('controllers')}",
            f"--service-account-private-key-file={self.pki.key('tokens')}",
            f"--root-ca-file={self.pki.authority}",
            "--leader-elect=false",
            *(_of_nodes(pod_networks) if pod_networks else ()),
        )
        self.scheduler = self._daemon(
            str(binaries / "kube-scheduler"),
            f"--kubeconfig={self.kubeconfig('controllers')}",
            "--leader-elect=false",
        )

    @property
    def daemons(self) -> tuple[Daemon, ...]:
        return (self.etcd, self.api_server, self.controller_manager, self.scheduler)

    def start(self) -> None:
        self.etcd.start()
        self.api_server.start()
        self.wait_until_ready()
        self.controller_manager.start()
        self.scheduler.start()

    def wait_until_ready(self) -> None:
        """The API server serves; raises with its log if it has ended."""
        polling.wait_until("the API server is ready", self._is_ready)

    def kubeconfig(self, user: str) -> pathlib.Path:
        return self.pki.kubeconfig(user, self.server)

    def _is_ready(self) -> bool:
        self.etcd.check()
        self.api_server.check()
        try:
            return self.api.text("/readyz") == "ok"
        except (OSError, HTTPException, ApiError, ssl.SSLError):
            return False

    def _sign(self, address: str) -> None:
        names = [f"DNS:{name}" for name in _NAMES]
        names += [f"IP:{one}" for one in ("127.0.0.1", address, SERVICE_ADDRESS)]
        self.pki.sign("server", user="kube-apiserver", hosts=",".join(names))
        for name in ("admin", "controllers", "kubelet-client"):
            self.pki.sign(name, user=name, groups=("system:masters",))
        self.pki.make_token_keys()

    def _api_server_flags(self, address: str) -> tuple[str, ...]:
        pki = self.pki
        return (
            f"--etcd-servers={_ETCD}",
            f"--advertise-address={address}",
            "--bind-address=0.0.0.0",
            f"--secure-port={PORT}",
            f"--service-cluster-ip-range={','.join(SERVICE_NETWORKS)}",
            f"--tls-cert-file={pki.certificate('server')}",
            f"--tls-private-key-file={pki.key('server')}",
            f"--client-ca-file={pki.authority}",
            f"--kubelet-client-certificate={pki.certificate('kubelet-client')}",
            f"--kubelet-client-key={pki.key('kubelet-client')}",
            "--kubelet-preferred-address-types=InternalIP",
            f"--service-account-key-file={pki.directory / 'tokens.pub'}",
            f"--service-account-signing-key-file={pki.key('tokens')}",
            "--service-account-issuer=https://kubernetes.default.svc",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",
            "--allow-privileged",
            # Nothing translates addresses of services: it calls webhooks at those of their pods.
            "--enable-aggregator-routing",
        )

    def _daemon(self, program: str, *flags: str) -> Daemon:
        name = pathlib.Path(program).name
        return Daemon([program, *flags], self._cgroup / name, self._logs / f"{name}.log")


def _of_nodes(pod_networks: Sequence[str]) -> tuple[str, ...]:
    return (
        "--allocate-node-cidrs",
        f"--cluster-cidr={','.join(pod_networks)}",
        f"--service-cluster-ip-range={','.join(SERVICE_NETWORKS)}",
    )


def missing(binaries: pathlib.Path) -> str:
    """One sentence of what is missing in BIN, or nothing."""
    lost = [name for name in PROGRAMS if not (binaries / name).is_file()]
    if lost:
        return f"BIN={binaries} has no {', '.join(lost)}; name a directory that has all of them."
    if not pathlib.Path(_etcd(binaries)).is_file():
        return f"BIN={binaries} has no etcd; put etcd 3.5 or newer there, or install etcd-server."
    return ""


def _etcd(binaries: pathlib.Path) -> str:
    """Debian 12's is 3.4, which sends no bookmarks; so one in BIN comes first."""
    own = binaries / "etcd"
    return str(own) if own.is_file() else shutil.which("etcd") or "etcd"


def _made(directory: pathlib.Path) -> pathlib.Path:
    directory.mkdir(parents=True)
    return directory
