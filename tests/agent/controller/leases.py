"""A Lease on an API server that answers as the recordings beside it show."""

import copy
import json
import pathlib
from typing import Any

from aiohttp import web

from tests.agent.kube.apiserver import ApiServer

RECORDED = pathlib.Path(__file__).parent / "recorded"
PATH = "/apis/coordination.k8s.io/v1/namespaces/podgate/leases"


def recorded(name: str) -> Any:
    """What the real one answered: `http` and `body`."""
    return json.loads((RECORDED / f"{name}.json").read_text(encoding="utf-8"))


class Leases:
    """One Lease, `current`. Added to a server, it answers its requests."""

    def __init__(self, server: ApiServer) -> None:
        self.current: Any = None
        self.writers: list[str] = []
        """The holder in each write, in order."""
        self._version = 100
        server.faults.append(self._answer)

    async def _answer(self, request: web.Request) -> web.StreamResponse | None:
        if not request.path.startswith(PATH):
            return None
        if request.method == "GET":
            if self.current is None:
                return _response("lease-get-404")
            return web.json_response(self.current)
        body = json.loads(await request.read())
        if request.method == "POST":
            if self.current is not None:
                return _response("lease-create-409")
            return web.json_response(self._store(body, "lease-create"), status=201)
        if body["metadata"]["resourceVersion"] != self.current["metadata"]["resourceVersion"]:
            return _response("lease-update-409")
        return web.json_response(self._store(body, "lease-update"))

    def _store(self, body: Any, name: str) -> Any:
        made = copy.deepcopy(recorded(name)["body"])
        self._version += 1
        made["metadata"] |= {
            "name": body["metadata"]["name"],
            "resourceVersion": str(self._version),
        }
        made["spec"] = body["spec"]
        self.current = made
        self.writers.append(body["spec"].get("holderIdentity", ""))
        return made


def _response(name: str) -> web.Response:
    found = recorded(name)
    return web.json_response(found["body"], status=found["http"])
