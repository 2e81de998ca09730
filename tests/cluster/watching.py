"""When pods change, as a client of the API server sees it."""

import contextlib
import http.client
import threading
import time
from collections.abc import Iterator

from tests import polling
from tests.cluster.workloads import Workloads, condition

_END = "end-of-the-watch"
# A crowd of pods beside a load.
_PATIENCE_SECONDS = 300


class Watch:
    """The first time that each condition of each pod was True. Times are of the monotonic clock,
    since those in the API have whole seconds."""

    def __init__(self, users: Workloads) -> None:
        self._users = users
        self._first: dict[tuple[str, str], float] = {}
        self._is_open = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch")

    def when(self, name: str, kind: str) -> float:
        """Wait until the pod's condition was True; seconds of the monotonic clock."""
        key = (name, kind)
        found = polling.wait_until(
            f"{name} has {kind}", lambda: self._first.get(key), seconds=_PATIENCE_SECONDS
        )
        assert found is not None
        return found

    def _run(self) -> None:
        with contextlib.suppress(OSError, http.client.HTTPException):
            for event in self._users.api.watch(self._users.pods_path, timeoutSeconds="3600"):
                now = time.monotonic()
                pod = event["object"]
                name = pod["metadata"]["name"]
                if name == _END:
                    return
                for one in pod["status"].get("conditions", []):
                    if condition(pod, one["type"]).get("status") == "True":
                        self._first.setdefault((name, one["type"]), now)
                if event["type"] == "DELETED":
                    for key in [key for key in self._first if key[0] == name]:
                        del self._first[key]


@contextlib.contextmanager
def watch(users: Workloads) -> Iterator[Watch]:
    """Watch a namespace. It ends with a pod that is created for that."""
    made = Watch(users)
    made._thread.start()
    try:
        yield made
    finally:
        users.run(_END, nodeName="elsewhere")
        made._thread.join(polling.PATIENCE_SECONDS)
        users.api.delete(f"{users.pods_path}/{_END}", gracePeriodSeconds="0")
