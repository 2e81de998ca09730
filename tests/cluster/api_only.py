"""etcd and an API server without nodes: they start in seconds, and objects are all there is."""

import base64
import contextlib
import dataclasses
import http.client
import json
import os
import pathlib
import re
import ssl
import subprocess
import sys
import uuid
from collections.abc import Iterator
from typing import Any

from agent.controller import webhook_certificate
from agent.lab.lab import NODE_IPV4, Lab
from agent.linux.cgroups import cgroup2_mount
from tests import polling
from tests.cluster.api import Api, Json
from tests.cluster.control_plane import PORT, SERVICE_ADDRESS, ControlPlane
from tests.conftest import fresh_lab
from tests.image import manifests

# In the API server's range of services, and an address of the node.
CONTROLLER_ADDRESS = "198.18.200.9"
_CLIENT = "apiserver-to-webhooks"


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """Of one request."""

    code: int
    body: Any
    warnings: tuple[str, ...]

    @property
    def message(self) -> str:
        return str(self.body.get("message", "")) if self.code >= 400 else ""


class ApiOnly:
    """A running API server."""

    def __init__(
        self,
        control_plane: ControlPlane,
        directory: pathlib.Path,
        lab: Lab,
        has_client_certificate: bool,
    ) -> None:
        """lab: of the node that it runs on; has_client_certificate: as of `running`."""
        self.control_plane = control_plane
        self.lab = lab
        self._directory = directory
        self._has_client_certificate = has_client_certificate

    @property
    def api(self) -> Api:
        return self.control_plane.api

    def send(
        self,
        method: str,
        path: str,
        body: Json,
        *,
        content_type: str = "application/json",
        token: str = "",
    ) -> Answer:
        """Send a request, as the administrator or with a token, and return the whole answer."""
        pki = self.control_plane.pki
        tls = ssl.create_default_context(cafile=str(pki.authority))
        headers = {"Content-Type": content_type}
        if token:
            headers["Authorization"] = f"Bearer {token}"
        else:
            tls.load_cert_chain(pki.certificate("admin"), pki.key("admin"))
        connection = http.client.HTTPSConnection(str(NODE_IPV4), PORT, timeout=30, context=tls)
        with contextlib.closing(connection):
            connection.request(method, path, json.dumps(body), headers)
            response = connection.getresponse()
            warnings = response.headers.get_all("Warning") or []
            found = json.loads(response.read())
        texts = tuple(re.sub(r'^\d+ \S+ "(.*)"$', r"\1", text) for text in warnings)
        return Answer(response.status, found, texts)

    def token(self, account: str, *, pod: Json | None = None) -> str:
        """A token of a service account of podgate's namespace, bound to a pod as the kubelet's."""
        spec: Json = {"expirationSeconds": 3600}
        if pod:
            spec["boundObjectRef"] = {
                "apiVersion": "v1",
                "kind": "Pod",
                "name": pod["metadata"]["name"],
                "uid": pod["metadata"]["uid"],
            }
        path = f"/api/v1/namespaces/podgate/serviceaccounts/{account}/token"
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
        return str(self.api.create(path, body)["status"]["token"])

    def kubeconfig(self, account: str) -> pathlib.Path:
        """A kubeconfig with that account's token."""
        content = json.loads(self.control_plane.kubeconfig("admin").read_text(encoding="utf-8"))
        content["users"][0]["user"] = {"token": self.token(account)}
        path = self._directory / f"{account}.conf"
        path.write_text(json.dumps(content), encoding="utf-8")
        return path

    def install_certificate(self) -> None:
        """Run the webhooks' Job, with the rights of the manifests, and write the controller's
        files as the kubelet does."""
        job = manifests.of_kind("Job", webhook_certificate.NAME)
        (container,) = job["spec"]["template"]["spec"]["containers"]
        installed = ("mutatingwebhookconfigurations", "validatingwebhookconfigurations")
        names = {
            f"{kind}/{one['metadata']['name']}"
            for kind in installed
            for one in self.api.items(f"/apis/admissionregistration.k8s.io/v1/{kind}")
        }
        arguments = [
            one
            for one in container["args"]
            if not one.startswith("--configuration=") or one.partition("=")[2] in names
        ]
        command = [sys.executable, "-m", "agent", *arguments]
        kubeconfig = self.kubeconfig(webhook_certificate.NAME)
        subprocess.run([*command, f"--kubeconfig={kubeconfig}"], check=True, timeout=120)
        secret = self.api.get(webhook_certificate.secret_path("podgate"))
        self.webhook_tls.mkdir(exist_ok=True)
        for name in ("tls.crt", "tls.key"):
            content = base64.b64decode(secret["data"][name])
            (self.webhook_tls / name).write_bytes(content)

    @property
    def webhook_tls(self) -> pathlib.Path:
        return self._directory / "webhook-tls"

    @contextlib.contextmanager
    def controller(self, *, port: int = 9651, webhook: int = 9443) -> Iterator["Replica"]:
        """A replica of the controller, with the rights of the manifests."""
        log = self._directory / f"controller-{uuid.uuid4().hex[:6]}.log"
        command = [
            *(sys.executable, "-m", "agent", "controller"),
            f"--kubeconfig={self.kubeconfig('podgate-controller')}",
            f"--http-address=127.0.0.1:{port}",
            f"--webhook-address={CONTROLLER_ADDRESS}:{webhook}",
            f"--webhook-tls={self.webhook_tls}",
        ]
        if self._has_client_certificate:
            # The authority signs others, too.
            authority = self.control_plane.pki.authority
            command += [f"--webhook-client-ca={authority}", f"--webhook-client-name={_CLIENT}"]
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output)
        replica = Replica(process, port, log)
        try:
            yield replica
        finally:
            if process.poll() is None:
                process.kill()
            process.wait(30)


class Replica:
    """A process of `podgate controller`."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: pathlib.Path) -> None:
        self.process = process
        self._port = port
        self._log = log

    def wait_until_ready(self) -> None:
        polling.wait_until("the controller is ready", lambda: self._get("/readyz") == "ok")

    @property
    def is_leading(self) -> bool:
        return "podgate_controller_leading 1.0" in self._get("/metrics")

    def log(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    def _get(self, path: str) -> str:
        assert self.process.poll() is None, f"the controller has ended: {self.log()[-2000:]}"
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=5)
        with contextlib.closing(connection), contextlib.suppress(OSError):
            connection.request("GET", path)
            return connection.getresponse().read().decode().strip()
        return ""


def _configure_clients(control_plane: ControlPlane) -> pathlib.Path:
    """The file of an AdmissionConfiguration (apiserver.config.k8s.io/v1) with the certificate that
    the API server presents to the controller's webhooks."""
    pki = control_plane.pki
    pki.sign(_CLIENT, user=_CLIENT)
    kubeconfig = pki.directory / "webhooks.conf"
    user = {
        # The port is a part of it unless it is 443.
        "name": "podgate-controller.podgate.svc:9443",
        "user": {
            "client-certificate": str(pki.certificate(_CLIENT)),
            "client-key": str(pki.key(_CLIENT)),
        },
    }
    content: Json = {"apiVersion": "v1", "kind": "Config", "users": [user]}
    kubeconfig.write_text(json.dumps(content), encoding="utf-8")
    group = "apiserver.config.k8s.io/v1"
    configuration = {
        "apiVersion": group,
        "kind": "WebhookAdmissionConfiguration",
        "kubeConfigFile": str(kubeconfig),
    }
    plugins = ("MutatingAdmissionWebhook", "ValidatingAdmissionWebhook")
    path = pki.directory / "admission.json"
    content = {
        "apiVersion": group,
        "kind": "AdmissionConfiguration",
        "plugins": [{"name": name, "configuration": configuration} for name in plugins],
    }
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


@contextlib.contextmanager
def running(
    binaries: pathlib.Path,
    directory: pathlib.Path,
    *flags: str,
    has_client_certificate: bool = False,
) -> Iterator[ApiOnly]:
    """Start an API server with these flags in addition.

    has_client_certificate: whether it presents one to the controller's webhooks, which requires it.
    """
    cgroup2 = cgroup2_mount()
    assert cgroup2 is not None, "cgroup v2 is not mounted"
    cgroup = cgroup2 / f"podgate-api-{os.getpid()}-{uuid.uuid4().hex[:6]}"
    with contextlib.ExitStack() as undo:
        lab = undo.enter_context(fresh_lab())
        for address in (SERVICE_ADDRESS, CONTROLLER_ADDRESS):
            subprocess.run(
                # Another server of this node may have had them.
                ("ip", "address", "replace", f"{address}/32", "dev", "lo"),
                check=True,
                timeout=60,
            )
        cgroup.mkdir()
        undo.callback(cgroup.rmdir)
        control_plane = ControlPlane(binaries, directory / "made", cgroup, str(NODE_IPV4))
        control_plane.api_server.command.extend(flags)
        if has_client_certificate:
            path = _configure_clients(control_plane)
            control_plane.api_server.command.append(f"--admission-control-config-file={path}")
        undo.callback(control_plane.etcd.kill)
        undo.callback(control_plane.api_server.kill)
        undo.callback(control_plane.api.close)
        control_plane.etcd.start()
        control_plane.api_server.start()
        control_plane.wait_until_ready()
        yield ApiOnly(control_plane, directory, lab, has_client_certificate)
