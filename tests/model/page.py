"""`python -m tests.model.page`: writes the order of checks in docs/security.md, from the
specification of the gate. `make docs` runs it, and a test holds that the page is current.
"""

import pathlib
import sys

from bpf.verdicts import Reason
from tests.model import gate

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "security.md"
_BEGIN = (
    "<!-- `make docs` writes this table from tests/model/gate.py; manual changes are lost. -->\n"
)
_END = "<!-- end of the table -->\n"


def render(page: str) -> str:
    """The page with its table as of now. Raises `ValueError` without the table's two marks."""
    before, begin, rest = page.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not begin or not end:
        raise ValueError(f"the page has no table between {_BEGIN.strip()!r} and {_END.strip()!r}")
    return f"{before}{_BEGIN}{_table()}{_END}{after}"


def _table() -> str:
    rows = ["| | packets | pass as | dropped as |", "|---|---|---|---|"]
    for number, check in enumerate(gate.ORDER, start=1):
        passed = _labels([reason for reason in check.reasons if not reason.is_drop])
        dropped = _labels([reason for reason in check.reasons if reason.is_drop])
        if not check.reasons:
            passed = "not counted"
        rows.append(f"| {number} | {check.what} | {passed} | {dropped} |")
    return "".join(f"{row}\n" for row in rows)


def _labels(reasons: list[Reason]) -> str:
    return ", ".join(f"`{reason.label}`" for reason in reasons)


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    sys.exit(0)
