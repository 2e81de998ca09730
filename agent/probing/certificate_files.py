"""Client certificates of probes in files on the node, which agents such as spiffe-helper write.

A pod's probe names `ROOT/NAMESPACE/NAME`, with the pod's own namespace: so the directory decides
whose pods may use a certificate, and no name in a spec leads to that of another namespace.
"""

import contextlib
import os
import pathlib

from agent.linux import beneath
from probes.protocols.client_certificates import CertificateError, ClientCertificate

MAX_BYTES = 64 * 1024
"""Of each file: a chain, or a bundle of authorities."""

_TRIES = 3
"""A renewal may come between the reads of a certificate and its key."""


def read(
    root: pathlib.Path, namespace: str, name: str, previous: ClientCertificate | None
) -> ClientCertificate:
    """Read tls.crt, tls.key and, if it exists, ca.crt; `previous` if nothing has changed.

    Blocks. Raises `CertificateError`.
    """
    where = f"{namespace}/{name}"
    try:
        directory = beneath.open_directory(root, namespace, name)
    except OSError as error:
        text = f"the directory {where} with a client certificate cannot be opened"
        raise CertificateError(f"{text} ({error.strerror})") from error
    try:
        for left in reversed(range(_TRIES)):
            try:
                return _read(directory, previous)
            except CertificateError as error:
                if not left:
                    text = f"the client certificate in the directory {where} is unusable"
                    raise CertificateError(f"{text}: {error}") from error
    finally:
        os.close(directory)
    raise AssertionError


def _read(directory: int, previous: ClientCertificate | None) -> ClientCertificate:
    certificate = _content(directory, "tls.crt")
    key = _content(directory, "tls.key")
    authorities = b""
    with contextlib.suppress(FileNotFoundError):
        authorities = _content(directory, "ca.crt")
    if previous is not None and previous.has_content(certificate, key, authorities):
        return previous
    return ClientCertificate(certificate, key, authorities)


def _content(directory: int, name: str) -> bytes:
    try:
        return beneath.read_file(directory, name, MAX_BYTES)
    except FileNotFoundError:
        if name == "ca.crt":
            raise
        raise CertificateError(f"{name} does not exist") from None
    except OSError as error:
        raise CertificateError(f"{name} cannot be read ({error.strerror})") from error
