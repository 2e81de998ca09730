"""The pages of the documentation name files, functions, metrics and options that exist."""

import re

from bpf import map_specs
from tests.docs.blocks import PAGES, ROOT
from tests.tracing.journeys import journeys

# Of Python, pip, pytest, image builders, kube-proxy, kubelet, Cilium, example clients, kubectl
# podgate.
OTHER_OPTIONS = {
    *("--system-site-packages", "--cluster-cidr", "--root-dir", "--cgroup-root"),
    *("--require-hashes", "--build-arg", "--twice"),
    *("--once", "--instance-id", "--rev", "--error-delay", "--allow-localhost"),
    "--yes",
}

_FILE = re.compile(
    r"(?<![\w./-])((?:agent|bpf|probes|tests|deploy|docs)/[\w./-]*\w\.(?:py|c|h|md|proto|yaml|sh|json))"
)


def test_files_that_pages_name_exist() -> None:
    named = {(page.name, path) for page in PAGES for path in _FILE.findall(page.read_text("utf-8"))}
    # NAME is what a recipe's reader puts there.
    missing = {(page, path) for page, path in named if not (ROOT / path).exists()}
    assert {(page, path) for page, path in missing if "/NAME." not in path} == set()


def test_names_in_a_step_are_in_its_files() -> None:
    maps = {spec.name for spec in map_specs.MAPS}
    missing = []
    for title, journey in journeys().items():
        for step in journey.steps:
            text = "".join((ROOT / path).read_text("utf-8") for path in step.files)
            known = maps | set(re.findall(r"\w+", text))
            missing += [f"{title}: {step.path}: {w}" for w in step.words if w not in known]
    assert missing == []


def test_metrics_and_options_that_pages_name_exist() -> None:
    reference = "".join(path.read_text("utf-8") for path in ROOT.glob("docs/reference/*.md"))
    unknown = set()
    for page in PAGES:
        text = page.read_text("utf-8")
        metrics = set(re.findall(r"`(podgate_\w+)`", text))
        options = set(re.findall(r"`(?:podgate [a-z ]+)?(--[a-z][\w-]+)", text)) - OTHER_OPTIONS
        unknown |= {(page.name, name) for name in metrics | options if name not in reference}
    assert unknown == set()
