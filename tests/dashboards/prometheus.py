"""Debian's Prometheus, which scrapes one agent, and its HTTP API."""

import contextlib
import json
import pathlib
import re
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from typing import Any

from tests import polling

_PROGRAM = pathlib.Path(sys.prefix) / "bin" / "prometheus"
_ADDRESS = "127.0.0.1:9090"
_LABELS = {"node": "node1", "instance": "node1"}

_LABEL = re.compile(r"{{(\w+)}}")

Series = dict[str, list[tuple[float, float]]]
"""Times (seconds since the epoch) and values, by legend."""


@contextlib.contextmanager
def running(
    directory: pathlib.Path, target: str, interval_seconds: int, rules: dict[str, Any]
) -> Iterator[None]:
    """Scrape `target` (HOST:PORT), until the block ends. directory: for its data; rules: a rules
    file's content."""
    rule_file = directory / "rules.yml"
    rule_file.write_text(json.dumps(rules), encoding="utf-8")
    interval = f"{interval_seconds}s"
    configuration = {
        "global": {"scrape_interval": interval, "evaluation_interval": interval},
        "rule_files": [str(rule_file)],
        "scrape_configs": [
            {
                "job_name": "podgate",
                "honor_labels": True,
                "static_configs": [{"targets": [target], "labels": _LABELS}],
            }
        ],
    }
    path = directory / "prometheus.yml"
    path.write_text(json.dumps(configuration), encoding="utf-8")
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(
            (
                *(_PROGRAM, f"--config.file={path}", f"--storage.tsdb.path={directory}/data"),
                f"--web.listen-address={_ADDRESS}",
            ),
            stdout=log,
            stderr=log,
        )
        try:
            polling.wait_until("Prometheus is ready", _is_ready)
            yield
        finally:
            process.terminate()
            process.wait(polling.PATIENCE_SECONDS)


def query(expression: str, legend: str, start: float, end: float, step: float) -> Series:
    """The expression's values from start to end, each `step` seconds. legend: as Grafana's."""
    arguments = {"query": expression, "start": start, "end": end, "step": step}
    found = _get(f"/api/v1/query_range?{urllib.parse.urlencode(arguments)}")
    return {
        _legend(legend, one["metric"]): [(at, float(value)) for at, value in one["values"]]
        for one in found["data"]["result"]
    }


def _legend(template: str, labels: dict[str, str]) -> str:
    """A label that a series lacks is empty."""
    return _LABEL.sub(lambda found: labels.get(found[1], ""), template)


def _is_ready() -> bool:
    try:
        with urllib.request.urlopen(f"http://{_ADDRESS}/-/ready", timeout=10):
            return True
    except (urllib.error.URLError, OSError):
        return False


def _get(path: str) -> Any:
    with urllib.request.urlopen(
        f"http://{_ADDRESS}{path}", timeout=polling.PATIENCE_SECONDS
    ) as answer:
        return json.load(answer)
