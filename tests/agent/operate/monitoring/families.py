"""Names of metrics in expressions, and of all that collectors declare."""

import re

from agent import metrics
from agent.operate.cli import reference
from agent.operate.monitoring.recordings import RECORDINGS

_NAME = re.compile(r"\b(?:podgate|prober)_[a-z_]+")
_SUFFIX = re.compile(r"_(?:bucket|sum|count)$")
_RECORDED = re.compile(r"\w+(?::\w+){2}")


def declared() -> set[str]:
    """By all collectors."""
    reference.pages()
    return {family.name for family in metrics.families()}


def unknown(expression: str, families: set[str]) -> set[str]:
    """Names in an expression that are no metric, and no series of a recording rule."""
    recorded = {one.name for one in RECORDINGS}
    found = {name for name in _RECORDED.findall(expression) if name not in recorded}
    metrics_alone = _RECORDED.sub("", expression)
    return found | {
        name for name in _NAME.findall(metrics_alone) if _SUFFIX.sub("", name) not in families
    }
