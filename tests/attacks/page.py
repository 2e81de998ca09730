"""The two tables of docs/internals/attacks.md: attacks of the kit, and tests of attacks.

`make docs` writes them, and a test holds that they are current. The page names the files with
attacks; for each of them the second table has a row with each test, which is its name.
"""

import ast
import dataclasses
import pathlib
import re

from tests.attacks import kit, topologies
from tests.attacks.trick import Gap, Trick

_ROOT = pathlib.Path(__file__).parents[2]
PAGE = _ROOT / "docs" / "internals" / "attacks.md"
DIRECTORY = _ROOT / "tests" / "kernel"
_DEVICES = DIRECTORY / "devices"
_FILES = re.compile(r"`(test_\w+\.py)`")
_BEGIN = "<!-- `make docs` writes this table from the tests' names; manual changes are lost. -->\n"
_KIT_BEGIN = "<!-- `make docs` writes this from tests/attacks/; manual changes are lost. -->\n"
_END = "<!-- end of the table -->\n"


@dataclasses.dataclass(frozen=True, slots=True)
class Group:
    """The tests of one file. summary: the docstring's first sentence."""

    file: str
    summary: str
    tests: tuple[str, ...]


def groups(page: str) -> list[Group]:
    """The files that the page names before its list, in that order."""
    before = page.partition(_BEGIN)[0]
    return [_group(_path(name)) for name in dict.fromkeys(_FILES.findall(before))]


def render(page: str) -> str:
    """The page with its tables as of now. Raises `ValueError` without the marks of one."""
    page = _replaced(page, _KIT_BEGIN, _kit())
    return _replaced(page, _BEGIN, _table(page))


def _replaced(page: str, mark: str, table: str) -> str:
    before, begin, rest = page.partition(mark)
    _, end, after = rest.partition(_END)
    if not begin or not end:
        raise ValueError(f"the page has no table between {mark.strip()!r} and {_END.strip()!r}")
    return f"{before}{mark}{table}{_END}{after}"


def _path(name: str) -> pathlib.Path:
    path = DIRECTORY / name
    return path if path.exists() else _DEVICES / name


def _group(path: pathlib.Path) -> Group:
    module = ast.parse(path.read_text(encoding="utf-8"))
    names = [
        node.name
        for node in module.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
    ]
    text = " ".join((ast.get_docstring(module) or "").split())
    return Group(path.name, re.split(r"(?<=[.:]) ", text)[0].rstrip(".:"), tuple(names))


def _table(page: str) -> str:
    rows = ["| tests | what they show |", "|---|---|"]
    for group in groups(page):
        where = _path(group.file).relative_to(_ROOT)
        title = f"{group.summary} ([{group.file}](../../{where}))"
        rows += [f"| {title} | {_sentence(group.tests[0])}. |"]
        rows += [f"| | {_sentence(name)}. |" for name in group.tests[1:]]
    return "".join(f"{row}\n" for row in rows)


def _sentence(name: str) -> str:
    words = re.sub(r"_s(?=_|$)", "'s", name.removeprefix("test_")).replace("_", " ")
    return words[0].upper() + words[1:]


def _kit() -> str:
    rows = ["| topology | what it is | ways by which packets come in again |", "|---|---|---|"]
    rows += [f"| {one} | {one.what} | {', '.join(one.ways)} |" for one in topologies.ALL]
    rows += ["", "| attack | rights over IPv4 | over IPv6 | by each way | except |"]
    rows += ["|---|---|---|---|---|"]
    rows += [_trick(trick) for trick in kit.TRICKS]
    return "".join(f"{row}\n" for row in rows)


def _trick(trick: Trick) -> str:
    rights = [str(trick.rights.get(version, "-")) for version in (4, 6)]
    gaps = "; ".join(map(_gap, trick.gaps))
    cells = [f"{trick}: {trick.what}", *rights, "yes" if trick.needs_way else "", gaps]
    return f"| {' | '.join(cells)} |"


def _gap(gap: Gap) -> str:
    where = [*sorted(gap.topologies), *(f"by {way}" for way in sorted(gap.ways))]
    where += [f"over IPv{version}" for version in sorted(gap.versions)]
    what = "known bypass, " if gap.is_bypass else ""
    return f"{what}{' '.join(where)}: {gap.why}"
