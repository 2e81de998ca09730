"""docs/reference/ and the CustomResourceDefinition are current."""

import difflib

from agent.operate.cli import reference
from bpf.verdicts import Reason, Verdict


def test_pages_are_current() -> None:
    pages = reference.pages()
    changes = [
        line
        for name, text in pages.items()
        for line in difflib.unified_diff(
            (reference.ROOT / name).read_text(encoding="utf-8").splitlines(),
            text.splitlines(),
            name,
            "made now",
            lineterm="",
        )
    ]
    assert changes == [], "\n".join(["run 'make docs' and commit it", *changes])
    schemas = {name for name in pages if name.endswith(".schema.json")}
    directory = reference.ROOT / "docs" / "reference"
    assert schemas == {
        str(path.relative_to(reference.ROOT)) for path in directory.rglob("*.schema.json")
    }
    page = pages["docs/reference/reasons.md"]
    words = [*(reason.label for reason in Reason), *(verdict.label for verdict in Verdict)]
    assert [word for word in words if f"`{word}`" not in page] == []
