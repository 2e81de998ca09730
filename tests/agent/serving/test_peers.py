"""Users of this machine are recognised, also over TCP."""

import contextlib
import ipaddress
import socket
from collections.abc import Iterator

import pytest

from agent.serving import peers
from agent.serving.places import Peer
from probes.sock_diag import SockDiag
from tests import unprivileged

CONNECT = """
import socket
host, port, source, source_port, ends = sys.argv[1:]
made = socket.socket(socket.AF_INET6 if ":" in source else socket.AF_INET)
made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
made.bind((source, int(source_port)))
made.connect((host, int(port)))
if ends == "shut":
    made.shutdown(socket.SHUT_WR)
elif ends == "closed":
    made.close()
ready(1)
"""


@contextlib.contextmanager
def connected(
    listening: socket.socket, source: str = "127.0.0.1", port: int = 0, ends: str = ""
) -> Iterator[socket.socket]:
    """A connection of the user without rights, as accepted."""
    host, own_port = listening.getsockname()[:2]
    target = {"0.0.0.0": "127.0.0.1", "::": "127.0.0.1"}.get(host, host)
    arguments = (target, str(own_port), source, str(port), ends)
    with unprivileged.running(CONNECT, *arguments) as result:
        assert result == "1"
        accepted, _ = listening.accept()
        with accepted:
            yield accepted


CONNECT_UNIX = """
import socket
made = socket.socket(socket.AF_UNIX)
made.connect(sys.argv[1])
ready(1)
"""

NOBODY = Peer("user 65534")


@pytest.mark.kernel
@pytest.mark.parametrize("source", ["127.0.0.1", "127.0.0.2", "127.9.9.9"])
def test_user_is_one_client_whatever_its_address_is(source: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening, connected(listening, source) as found:
        assert peers.of(found) == NOBODY


@pytest.mark.kernel
def test_user_is_recognised_over_ipv6_and_through_a_socket_of_both_families() -> None:
    only = socket.create_server(("::1", 0), family=socket.AF_INET6)
    with only as listening, connected(listening, "::1") as found:
        assert peers.of(found) == NOBODY
    both = socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    with both as listening, connected(listening, "127.0.0.1") as found:
        assert peers.of(found) == NOBODY


@pytest.mark.kernel
def test_root_is_recognised() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        socket.create_connection(listening.getsockname()),
    ):
        accepted, _ = listening.accept()
        with accepted:
            assert peers.of(accepted) == Peer("user 0", is_root=True)


@pytest.mark.kernel
@pytest.mark.parametrize("ends", ["shut", "closed"])
def test_socket_that_was_closed_already_is_not_roots(ends: str) -> None:
    """The kernel reports user 0 for it."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        connected(listening, ends=ends) as found,
    ):
        assert peers.of(found).is_root is False


@pytest.mark.kernel
def test_client_that_comes_from_the_port_of_roots_server_is_not_root() -> None:
    """For a connection from another machine the kernel reports the listener of that port."""
    with (
        socket.create_server(("0.0.0.0", 0)) as roots,
        SockDiag() as diag,
    ):
        remote = ipaddress.ip_address("198.18.7.7"), roots.getsockname()[1]
        assert diag.user(socket.IPPROTO_TCP, remote, (ipaddress.ip_address("127.0.0.1"), 1)) is None


@pytest.mark.kernel
def test_user_of_a_unix_socket_is_recognised() -> None:
    with unprivileged.visible_directory() as directory:
        path = directory / "s"
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(path))
            path.chmod(0o666)
            listening.listen()
            program = (
                "import socket; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); ready(1)"
            )
            with unprivileged.running(program, str(path)):
                accepted, _ = listening.accept()
                with accepted:
                    assert peers.of(accepted) == NOBODY
