"""A certificate that only encrypts, for a port whose clients trust none: made by a process of its
own, which exits, since the library that signs it takes 9 MB.
"""

import os
import ssl
import subprocess
import sys

_NAME = "podgate"
# On an idle machine it takes a quarter of a second.
_LIMIT_SECONDS = 60.0


def make() -> bytes:
    """A new certificate and its key, PEM. Blocks, so it is for a thread. Raises `OSError`."""
    command = [sys.executable, "-m", "agent.kube.self_signed", _NAME]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=True,
            timeout=_LIMIT_SECONDS,
        )
    except subprocess.CalledProcessError as error:
        last = error.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise OSError(f"the process that makes a certificate failed: {last}") from error
    except subprocess.TimeoutExpired as error:
        raise OSError("the process that makes a certificate takes too long") from error
    return done.stdout


def load(tls: ssl.SSLContext, content: bytes) -> None:
    """Use a certificate and its key for new connections of a server. Raises `ssl.SSLError`."""
    descriptor = os.memfd_create("podgate-tls", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, content)
        tls.load_cert_chain(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)
