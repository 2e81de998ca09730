"""Links between pages lead to files and headings that exist, and every page is in the index."""

import functools
import pathlib
import re

from agent.admin.finding_kinds import KINDS
from tests.docs.blocks import PAGES, ROOT

_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
_FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_PAGES = sorted({*PAGES, *ROOT.glob("docs/**/*.md")})


@functools.cache
def prose(page: pathlib.Path) -> str:
    return _FENCED.sub("", page.read_text("utf-8"))


@functools.cache
def anchors(page: pathlib.Path) -> set[str]:
    """As GitHub makes them: lower case, without punctuation, "-" for each space."""
    titles = (
        re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title) for title in _HEADING.findall(prose(page))
    )
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_links_lead_somewhere() -> None:
    broken = []
    links = [(page, link) for page in _PAGES for link in _LINK.findall(prose(page))]
    for page, link in links:
        path, _, anchor = link.partition("#")
        if "://" in path:
            continue
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(f"{page.relative_to(ROOT)}: {link}")
    assert broken == []


def test_every_page_is_in_the_index() -> None:
    index = ROOT / "docs" / "README.md"
    linked = {
        (index.parent / link.partition("#")[0]).resolve() for link in _LINK.findall(prose(index))
    }
    runbooks = {page for page in _PAGES if page.parent.name == "runbooks"}
    pages = {page for page in _PAGES if page.is_relative_to(ROOT / "docs")} - {index} - runbooks
    assert {str(page.relative_to(ROOT)) for page in pages - linked} == set()


# Conditions, reasons and kinds of Kubernetes and of the runtime, which podgate never writes.
_OF_OTHERS = {
    *("ContainersReady", "ContainerCreating", "ImagePullBackOff", "ResourceQuota", "NetworkPolicy"),
    *("ClusterFirstWithHostNet", "DirectoryOrCreate", "RuntimeDefault", "PodMonitor"),
}


def test_conditions_and_events_that_pages_name_exist() -> None:
    pages = (
        *("failures.md", "internals/tested-failures.md"),
        *("security.md", "threat-model.md", "faq.md", "guides/probes.md"),
    )
    text = "".join((ROOT / "docs" / name).read_text("utf-8") for name in pages)
    paths = [*ROOT.glob("agent/**/*.py"), *ROOT.glob("probes/**/*.py")]
    sources = "".join(path.read_text("utf-8") for path in paths)
    sources += " ".join(kind.reason for kind in KINDS.values())
    reasons = set(re.findall(r"`([A-Z][a-z]+(?:[A-Z][a-z]+)+)`", text)) - _OF_OTHERS
    events = {event.upper() for event in re.findall(r"log event `(\w+)`", text)}
    assert {word for word in reasons | events if not re.search(rf"\b{word}\b", sources)} == set()
