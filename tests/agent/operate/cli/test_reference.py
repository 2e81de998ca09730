"""docs/reference/ and the CustomResourceDefinition are current."""

from agent.operate.cli import reference
from bpf.verdicts import Reason, Verdict


def test_pages_are_current() -> None:
    pages = reference.pages()
    written = {name: (reference.ROOT / name).read_text(encoding="utf-8") for name in pages}
    others = {name: text for name, text in pages.items() if text != written[name]}
    assert {name: written[name] for name in others} == others, "run 'make docs' and commit it"
    page = pages["docs/reference/reasons.md"]
    words = [*(reason.label for reason in Reason), *(verdict.label for verdict in Verdict)]
    assert [word for word in words if f"`{word}`" not in page] == []
