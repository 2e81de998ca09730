"""A host process that dials an address in a tight loop, before the pod exists."""

import contextlib
import errno
import ipaddress
import select
import socket
import threading
from collections.abc import Iterator

from tests import polling

PORT = 8080
_ATTEMPT_MS = 3


class Dialler:
    """Counts its attempts, and how many of them connected."""

    def __init__(self, addresses: tuple[str, ...]) -> None:
        self.attempts = 0
        self.connected = 0
        self._addresses = addresses
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dialler")

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._ends.set()
        self._thread.join()

    def go_on(self, attempts: int = 30) -> None:
        """Wait until this many more attempts have finished."""
        until = self.attempts + attempts
        polling.wait_until(f"{attempts} more attempts", lambda: self.attempts >= until)

    def _run(self) -> None:
        while not self._ends.is_set():
            for address in self._addresses:
                self.connected += _dial(address)
                self.attempts += 1


def _dial(address: str) -> bool:
    version = ipaddress.ip_address(address).version
    family = socket.AF_INET if version == 4 else socket.AF_INET6
    with socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as sock:
        error = sock.connect_ex((address, PORT))
        if error == errno.EINPROGRESS:
            poll = select.poll()
            poll.register(sock, select.POLLOUT)
            # Here a connection takes a tenth of it.
            if not poll.poll(_ATTEMPT_MS):
                return False
            error = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        return error == 0


@contextlib.contextmanager
def dialling(*addresses: str) -> Iterator[Dialler]:
    """A client that dials PORT of these addresses until the block ends."""
    dialler = Dialler(addresses)
    dialler.start()
    try:
        yield dialler
    finally:
        dialler.stop()
