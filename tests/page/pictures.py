"""Renders the status page of a real agent for docs/: `python -m tests.page.pictures DIRECTORY`."""

import asyncio
import pathlib
import sys
import tempfile

from agent.lab import lab as labs
from tests.page import browser, node

_WIDTH, _HEIGHT = 960, 900
_MAX_BYTES = 200_000


async def _render(address: str, directory: pathlib.Path) -> None:
    with tempfile.TemporaryDirectory() as profile:
        async with browser.tab(pathlib.Path(profile)) as tab:
            for scheme in ("light", "dark"):
                await tab.show(address, width=_WIDTH, height=_HEIGHT, scheme=scheme)
                height = await tab.value("document.documentElement.scrollHeight")
                picture = await tab.picture(height=height)
                if len(picture) > _MAX_BYTES:
                    sys.exit(f"the picture has {len(picture)} bytes; at most {_MAX_BYTES}")
                (directory / f"status-page-{scheme}.png").write_bytes(picture)


def main() -> None:
    directory = pathlib.Path(sys.argv[1]).absolute()
    labs.isolate()
    with node.running() as (address, _):
        asyncio.run(_render(address, directory))


if __name__ == "__main__":
    main()
