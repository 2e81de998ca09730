"""How calls end: the status codes that metrics count."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Final

import grpc

from agent.api.server import RequestContext

OK: Final = "OK"
CANCELED: Final = "Canceled"
_UNKNOWN: Final = "Unknown"


@contextlib.asynccontextmanager
async def counted(context: RequestContext, count: Callable[[str], None]) -> AsyncIterator[None]:
    """Call `count` with the status of the call that ends inside, by Go's name of the code.

    grpcio has no code for a call that succeeds, that its client ends, or that raises.
    """
    status = OK
    try:
        yield
    except (asyncio.CancelledError, GeneratorExit):
        status = CANCELED
        raise
    except BaseException:
        code = context.code()
        status = name(code) if isinstance(code, grpc.StatusCode) else _UNKNOWN
        raise
    finally:
        count(status)


def name(code: grpc.StatusCode) -> str:
    """As Go's codes.Code prints it: ResourceExhausted."""
    return "".join(word.capitalize() for word in code.name.split("_"))
