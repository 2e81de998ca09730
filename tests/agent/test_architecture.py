"""docs/architecture.md and the other pages name files that exist, and journeys are connected."""

import ast
import itertools
import pathlib
import re

import pytest

from bpf import abi

ROOT = pathlib.Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("docs/*.md"), *ROOT.glob("docs/guides/*.md"), *ROOT.glob("*.md")])
PAGE = ROOT / "docs" / "architecture.md"
MAX_FILES = 15
# Of Python, pip, image builders, kube-proxy, kubelet, Cilium, example clients, kubectl podgate.
OTHER_OPTIONS = {
    *("--system-site-packages", "--cluster-cidr", "--root-dir"),
    *("--require-hashes", "--build-arg"),
    *("--once", "--instance-id", "--rev", "--error-delay", "--allow-localhost"),
    "--yes",
}

_FILE = re.compile(
    r"(?<![\w./-])((?:agent|bpf|probes|tests|deploy|docs)/[\w./-]*\w\.(?:py|c|h|md|proto|yaml|sh|json))"
)
_STEP = re.compile(r"^(\d+)\. `([\w./]+)`((?:.|\n(?! *\d+\.|\n))*)", re.MULTILINE)


def journeys() -> dict[str, list[list[tuple[str, str]]]]:
    """Title to lists of steps: path and text."""
    part = PAGE.read_text("utf-8").split("## Four journeys\n")[1].split("\n## ")[0]
    found: dict[str, list[list[tuple[str, str]]]] = {}
    for section in part.split("### ")[1:]:
        lists = found.setdefault(section.splitlines()[0], [])
        for number, path, text in _STEP.findall(section):
            if number == "1":
                lists.append([])
            lists[-1].append((path, text))
    return found


JOURNEYS = journeys()
HOPS = sorted(
    {
        (one, two)
        for lists in JOURNEYS.values()
        for steps in lists
        for (one, _), (two, _) in itertools.pairwise(steps)
    }
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_exist(page: pathlib.Path) -> None:
    named = set(_FILE.findall(page.read_text("utf-8")))
    assert {path for path in named if not (ROOT / path).exists()} == set()


def test_there_are_four_journeys() -> None:
    assert len(JOURNEYS) == 4


@pytest.mark.parametrize("title", JOURNEYS)
def test_journey_has_few_files(title: str) -> None:
    files = {path for steps in JOURNEYS[title] for path, _ in steps}
    assert 5 <= len(files) <= MAX_FILES


@pytest.mark.parametrize(("one", "two"), HOPS)
def test_consecutive_files_are_linked(one: str, two: str) -> None:
    assert linked(ROOT / one, ROOT / two) or linked(ROOT / two, ROOT / one)


@pytest.mark.parametrize("title", JOURNEYS)
def test_names_in_a_step_are_in_its_file(title: str) -> None:
    steps = [step for steps in JOURNEYS[title] for step in steps]
    missing = [
        f"{path}: {name}"
        for path, text in steps
        for name in re.findall(r"`(\w+)`", text)
        if not re.search(rf"\b{name}\b", (ROOT / path).read_text("utf-8"))
    ]
    maps = {spec.name for spec in abi.MAPS}
    assert [entry for entry in missing if entry.split(": ")[1] not in maps] == []


def linked(one: pathlib.Path, two: pathlib.Path) -> bool:
    """Python: `one` imports `two`. C: it calls a function of `two`. Both: they use one map."""
    if one.suffix == two.suffix == ".py":
        return two.relative_to(ROOT).with_suffix("") in imported(one)
    if ".py" not in (one.suffix, two.suffix):
        defined = re.findall(r"^ALWAYS_INLINE .*?(\w+)\(", two.read_text("utf-8"), re.MULTILINE)
        return any(f"{name}(" in one.read_text("utf-8") for name in defined)
    if one.suffix != ".py":
        return False
    constants = set(re.findall(r"\babi\.([A-Z][A-Z0-9_]*)\b", one.read_text("utf-8")))
    specs = [getattr(abi, constant) for constant in constants]
    words = set(re.findall(r"\w+", two.read_text("utf-8")))
    return any(isinstance(spec, abi.MapSpec) and spec.name in words for spec in specs)


def imported(path: pathlib.Path) -> set[pathlib.Path]:
    """Modules that a file imports, as paths without suffix."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            module = pathlib.Path(*node.module.split("."))
            found |= {module, *(module / alias.name for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {pathlib.Path(*alias.name.split(".")) for alias in node.names}
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_metrics_and_options_that_a_page_names_exist(page: pathlib.Path) -> None:
    text = page.read_text("utf-8")
    reference = "".join(path.read_text("utf-8") for path in ROOT.glob("docs/reference/*.md"))
    metrics = set(re.findall(r"`(podgate_\w+)`", text))
    options = set(re.findall(r"`(?:podgate [a-z ]+)?(--[a-z][\w-]+)", text)) - OTHER_OPTIONS
    assert {name for name in metrics | options if name not in reference} == set()
