"""When pods change, as a client of the API server sees it."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from tests import polling
from tests.cluster.api import Json
from tests.cluster.workloads import Workloads, condition

_END = "end-of-the-watch"
# A crowd of pods beside a load.
_PATIENCE_SECONDS = 300


@contextlib.contextmanager
def followed(users: Workloads, see: Callable[[Json], None]) -> Iterator[None]:
    """Watch a namespace's pods: `see` gets each event, in another thread. The watch ends with a pod
    that is created for that."""

    def follow() -> None:
        for event in users.api.watch(users.pods_path, timeoutSeconds="3600"):
            if event["object"]["metadata"]["name"] == _END:
                return
            see(event)

    thread = threading.Thread(target=follow, name="watch")
    thread.start()
    try:
        yield
    finally:
        users.run(_END, nodeName="elsewhere")
        thread.join(polling.PATIENCE_SECONDS)
        users.api.delete(f"{users.pods_path}/{_END}", gracePeriodSeconds="0")


class Watch:
    """The first time that each condition of each pod was True. Times are of the monotonic clock,
    since those in the API have whole seconds."""

    def __init__(self) -> None:
        self._first: dict[tuple[str, str], float] = {}

    def when(self, name: str, kind: str) -> float:
        """Wait until the pod's condition was True; seconds of the monotonic clock."""
        key = (name, kind)
        found = polling.wait_until(
            f"{name} has {kind}", lambda: self._first.get(key), seconds=_PATIENCE_SECONDS
        )
        assert found is not None
        return found

    def see(self, event: Json) -> None:
        now = time.monotonic()
        pod = event["object"]
        name = pod["metadata"]["name"]
        for one in pod["status"].get("conditions", []):
            if condition(pod, one["type"]).get("status") == "True":
                self._first.setdefault((name, one["type"]), now)
        if event["type"] == "DELETED":
            for key in [key for key in self._first if key[0] == name]:
                del self._first[key]


@contextlib.contextmanager
def watch(users: Workloads) -> Iterator[Watch]:
    made = Watch()
    with followed(users, made.see):
        yield made
