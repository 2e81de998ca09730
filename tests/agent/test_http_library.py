"""What aiohttp does not read when the agent imports it, and what others still do."""

import os
import pathlib
import subprocess
import sys

from tests.probes.authorities import Authority

_COUNT = """
import ssl
from agent.http_library import aiohttp
contexts = aiohttp.connector._SSL_CONTEXT_VERIFIED, aiohttp.connector._SSL_CONTEXT_UNVERIFIED
later = ssl.create_default_context()
print(*(len(context.get_ca_certs()) for context in (*contexts, later)))
"""


def test_machines_authorities_are_read_for_podgates_own_connections_only(
    tmp_path: pathlib.Path,
) -> None:
    authorities = tmp_path / "authorities.pem"
    authorities.write_bytes(Authority().certificate)
    environment = {**os.environ, "SSL_CERT_FILE": str(authorities), "SSL_CERT_DIR": str(tmp_path)}
    command = [sys.executable, "-c", _COUNT]
    counts = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    assert counts.stdout.split() == ["0", "0", "1"]
