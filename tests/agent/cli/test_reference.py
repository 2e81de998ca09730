"""docs/reference/ and the CustomResourceDefinition are current."""

import pytest

from agent.cli import reference
from bpf.verdicts import Reason, Verdict

PAGES = reference.pages()


@pytest.mark.parametrize("name", sorted(PAGES))
def test_page_is_current(name: str) -> None:
    written = (reference.ROOT / name).read_text(encoding="utf-8")
    assert written == PAGES[name], "run 'make docs' and commit the result"


def test_all_reasons_and_verdicts_are_described() -> None:
    page = reference.pages()["docs/reference/reasons.md"]
    for word in (*(r.label for r in Reason), *(v.label for v in Verdict)):
        assert f"`{word}`" in page
