"""What a backend cannot do: the table of docs/proxy.md, which tests read."""

import functools
import pathlib

_PAGE = pathlib.Path(__file__).parents[2] / "docs" / "proxy.md"
_HEADING = "## What a backend cannot do"


def limit(backend: str, ability: str) -> str | None:
    """Why the backend cannot; None if it can. Raises `KeyError` if the page has no such row."""
    cell = _table()[ability][backend]
    return cell if cell.startswith("no") else None


@functools.cache
def _table() -> dict[str, dict[str, str]]:
    _, _, section = _PAGE.read_text(encoding="utf-8").partition(_HEADING)
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in section.partition("\n## ")[0].splitlines()
        if line.startswith("|")
    ]
    backends = [name.strip("`") for name in rows[0][1:]]
    return {ability: dict(zip(backends, cells, strict=True)) for ability, *cells in rows[2:]}
