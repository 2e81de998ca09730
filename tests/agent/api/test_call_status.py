"""How calls end, by the names that Go's metrics have."""

import asyncio
from typing import Any, cast

import grpc
import pytest

from agent.api.call_status import counted, name
from agent.api.server import RequestContext


class Context:
    def __init__(self, code: Any = 0) -> None:
        self._code = code

    def code(self) -> Any:
        return self._code


@pytest.mark.parametrize(
    ("error", "code", "status"),
    [
        (None, 0, "OK"),
        (asyncio.CancelledError(), grpc.StatusCode.ABORTED, "Canceled"),
        (GeneratorExit(), 0, "Canceled"),
        (OSError("no"), grpc.StatusCode.RESOURCE_EXHAUSTED, "ResourceExhausted"),
        # grpcio's number for none.
        (OSError("no"), 0, "Unknown"),
    ],
)
async def test_each_call_is_counted_once_with_its_status(
    error: BaseException | None, code: Any, status: str
) -> None:
    found: list[str] = []
    context = cast(RequestContext, Context(code))
    if error is None:
        async with counted(context, found.append):
            assert found == []
    else:
        with pytest.raises(type(error)):
            async with counted(context, found.append):
                raise error
    assert found == [status]


def test_codes_are_named_as_go_names_them() -> None:
    found = {name(code) for code in grpc.StatusCode}
    assert {"NotFound", "Unavailable", "DeadlineExceeded", "InvalidArgument"} <= found
