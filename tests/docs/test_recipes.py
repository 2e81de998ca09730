"""Names in the recipes and in README's table of the code are in the files beside them."""

import re

from tests.docs.blocks import ROOT

# Of shell, make and prose; not of one file.
_OTHER = {"strict", "enforce"}
_PATH = re.compile(r"`((?:agent|bpf|probes|tests|docs)/[\w./-]+)`")
_NAME = re.compile(r"`(\w+)`")


def entries() -> list[tuple[str, str]]:
    """Page and text of each step of a recipe, and of each row of the table."""
    contributing = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    recipes = contributing.split("\n## Recipes\n")[1].split("\n## ")[0]
    readme = (ROOT / "README.md").read_text("utf-8")
    table = readme.split("\n## Where it is in the code\n")[1].split("\n## ")[0]
    steps = re.findall(r"^\d+\. (?:.|\n(?!\d+\.|\n))*", recipes, re.MULTILINE)
    return [
        *(("CONTRIBUTING.md", step) for step in steps),
        *(("README.md", row) for row in table.splitlines() if row.startswith("| ")),
    ]


ENTRIES = [(page, text) for page, text in entries() if _PATH.search(text)]


def test_there_are_recipes_and_three_rows() -> None:
    pages = [page for page, _ in ENTRIES]
    assert pages.count("CONTRIBUTING.md") >= 10
    assert pages.count("README.md") == 3


def test_names_of_an_entry_are_in_its_files() -> None:
    missing = []
    for page, text in ENTRIES:
        # NAME is what the reader puts there.
        paths = [ROOT / path for path in _PATH.findall(text) if "/NAME." not in path]
        missing += [f"{page}: {path}" for path in paths if not path.exists()]
        sources = "".join(path.read_text("utf-8") for path in paths if path.is_file())
        for directory in (path for path in paths if path.is_dir()):
            sources += "".join(path.read_text("utf-8") for path in directory.glob("*.py"))
        names = set(_NAME.findall(text)) - _OTHER
        missing += [
            f"{page}: {name} in {text[:40]}"
            for name in names
            if not re.search(rf"\b{name}\b", sources)
        ]
    assert missing == []
