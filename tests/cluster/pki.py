"""The cluster's certificates, and kubeconfigs that use them."""

import json
import pathlib
import subprocess
from collections.abc import Sequence

_DAYS = "2"
_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


class Pki:
    """One authority, which signs clients and servers."""

    def __init__(self, directory: pathlib.Path) -> None:
        """directory: empty; it receives all keys and certificates."""
        self.directory = directory
        self.authority = directory / "ca.crt"
        self._authority_key = directory / "ca.key"
        _openssl(
            *("req", "-x509", *_KEY, "-days", _DAYS, "-subj", "/CN=podgate-tests"),
            *("-keyout", self._authority_key, "-out", self.authority),
        )

    def certificate(self, name: str) -> pathlib.Path:
        return self.directory / f"{name}.crt"

    def key(self, name: str) -> pathlib.Path:
        return self.directory / f"{name}.key"

    def sign(self, name: str, *, user: str, groups: Sequence[str] = (), hosts: str = "") -> None:
        """A key pair named `name`. user, groups: the user that the API server sees; hosts: a
        server's subject alternative names, such as `IP:127.0.0.1,DNS:localhost`."""
        subject = "".join(f"/O={group}" for group in groups) + f"/CN={user}"
        request = self.directory / f"{name}.csr"
        _openssl("req", *_KEY, "-subj", subject, "-keyout", self.key(name), "-out", request)
        extensions = self.directory / f"{name}.ext"
        extensions.write_text(f"subjectAltName={hosts}\n" if hosts else "", encoding="utf-8")
        _openssl(
            *("x509", "-req", "-days", _DAYS, "-in", request, "-out", self.certificate(name)),
            *("-CA", self.authority, "-CAkey", self._authority_key, "-CAcreateserial"),
            *("-extfile", extensions),
        )

    def make_token_keys(self) -> tuple[pathlib.Path, pathlib.Path]:
        """The public and the private key of service account tokens."""
        public, private = self.directory / "tokens.pub", self.key("tokens")
        _openssl("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", private)
        _openssl("ec", "-in", private, "-pubout", "-out", public)
        return public, private

    def kubeconfig(self, name: str, server: str) -> pathlib.Path:
        """Write the kubeconfig of a signed client. JSON, which is YAML, too."""
        path = self.directory / f"{name}.conf"
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [
                {
                    "name": "tests",
                    "cluster": {"server": server, "certificate-authority": str(self.authority)},
                }
            ],
            "users": [
                {
                    "name": name,
                    "user": {
                        "client-certificate": str(self.certificate(name)),
                        "client-key": str(self.key(name)),
                    },
                }
            ],
            "contexts": [{"name": "tests", "context": {"cluster": "tests", "user": name}}],
            "current-context": "tests",
        }
        path.write_text(json.dumps(content), encoding="utf-8")
        return path


def _openssl(*arguments: str | pathlib.Path) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)
