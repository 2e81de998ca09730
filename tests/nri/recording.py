"""Records a connection between a runtime and the agent, and reads such records.

A record is a file of JSON lines, one for each piece that was read: its side and its bytes.
"""

import asyncio
import base64
import contextlib
import json
import pathlib
from collections.abc import AsyncIterator

RECORDED = pathlib.Path(__file__).parents[1] / "agent" / "nri" / "recorded"

Piece = tuple[str, bytes]
"""Side ("runtime" or "plugin") and bytes."""


def read(path: pathlib.Path) -> list[Piece]:
    """The pieces of a record, the first one first."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [(line["from"], base64.b64decode(line["bytes"])) for line in lines]


def write(path: pathlib.Path, pieces: list[Piece]) -> None:
    lines = [
        json.dumps({"from": side, "bytes": base64.b64encode(content).decode()})
        for side, content in pieces
    ]
    path.write_text("".join(f"{line}\n" for line in lines))


@contextlib.asynccontextmanager
async def between(runtime: pathlib.Path, plugin: pathlib.Path) -> AsyncIterator[list[Piece]]:
    """Serve the runtime's socket at another path; the pieces of all connections, as they come."""
    pieces: list[Piece] = []

    async def copy(side: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while content := await reader.read(1 << 16):
            pieces.append((side, content))
            writer.write(content)
        writer.close()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        of_runtime, to_runtime = await asyncio.open_unix_connection(str(runtime))
        await asyncio.gather(
            copy("runtime", of_runtime, writer),
            copy("plugin", reader, to_runtime),
            return_exceptions=True,
        )

    server = await asyncio.start_unix_server(accept, str(plugin))
    try:
        yield pieces
    finally:
        server.close()
