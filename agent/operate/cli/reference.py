"""`make docs` generates docs/reference/ and the CustomResourceDefinition from the code."""

import argparse
import importlib
import json
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import click
import yaml

from agent import labels, metrics
from agent.admin.finding_kinds import page as finding_page
from agent.app import pod_services
from agent.operate.cli import log_reference, schemas
from agent.operate.cli import main as cli
from agent.operate.kubectl import main as plugin
from agent.operate.monitoring import alerts, recordings, rule_files
from agent.operate.monitoring.dashboards import DASHBOARDS
from agent.policy import definition
from bpf.verdicts import Mode, Reason, Verdict
from probes.spec import probespec

ROOT = pathlib.Path(__file__).parents[3]


def pages() -> dict[str, str]:
    """Path and content of every file."""
    return {
        "docs/reference/reasons.md": _reasons(),
        "docs/reference/metrics.md": _metrics(),
        "docs/reference/cli.md": _commands(),
        "docs/reference/kubectl.md": _plugin(),
        "docs/reference/logs.md": log_reference.page(),
        "docs/reference/findings.md": finding_page.text(),
        "docs/reference/probe-spec.schema.json": json.dumps(probespec.schema(), indent=2) + "\n",
        "deploy/chart/podgate/files/hostaccesspolicies.yaml": definition.manifest(),
        "deploy/chart/podgate/files/hostegresspolicies.yaml": definition.manifest(
            labels.EGRESS_KIND
        ),
        **{f"docs/reference/schemas/{name}": text for name, text in schemas.schemas().items()},
        "deploy/monitoring/alerts.yaml": _yaml(alerts.rules()),
        "deploy/monitoring/recordings.yaml": _yaml(rule_files.recording_rules()),
        "deploy/monitoring/prometheusrule.yaml": _yaml(rule_files.prometheus_rule()),
        "docs/reference/alerts.md": f"# Alerts\n\n{alerts.table()}",
        "docs/reference/recordings.md": f"# Recording rules\n\n{recordings.table()}",
        **{f"deploy/monitoring/dashboards/{one.uid}.json": one.content() for one in DASHBOARDS},
    }


def _yaml(document: dict[str, Any]) -> str:
    head = "# From agent/operate/monitoring, by `make docs`.\n"
    return head + yaml.safe_dump(document, sort_keys=False, width=100)


def _reasons() -> str:
    lines = [
        "# Verdicts, reasons and modes",
        "",
        "Counted per interface, for host packets only.",
        "",
        f"Verdicts: {', '.join(f'`{verdict.label}`' for verdict in Verdict)}. "
        f"Modes: {', '.join(f'`{mode.label}`' for mode in Mode)}.",
        "",
        "| reason | verdict | description |",
        "|---|---|---|",
        *(f"| `{reason.label}` | {_kind(reason)} | {reason.description} |" for reason in Reason),
    ]
    return "\n".join(lines) + "\n"


def _kind(reason: Reason) -> str:
    return "drop" if reason.is_drop else "pass"


def _metrics() -> str:
    # All collectors, which declare their families.
    for name in (
        *pod_services.OPTIONAL,
        "agent.controller.controller",
        "agent.services.proxy.metrics",
    ):
        importlib.import_module(name)
    lines = ["# Metrics", "", "| name | kind | labels | description |", "|---|---|---|---|"]
    for family in metrics.families():
        labels = ", ".join(f"`{label}`" for label in family.labels) or "none"
        lines.append(f"| `{family.name}` | {family.kind} | {labels} | {family.help} |")
    lines += [
        "",
        "In addition, the usual `process_*` series. A pod's series are removed with the pod.",
    ]
    return "\n".join(lines) + "\n"


def _commands() -> str:
    settings = {**cli.main.context_settings, "terminal_width": 96}
    root = click.Context(cli.main, info_name="podgate", **settings)
    return "\n\n".join(["# Command line", *_help("podgate", cli.main, root)]) + "\n"


def _plugin() -> str:
    """Its own tables: argparse's text differs between versions of Python."""
    root = plugin.parser()
    (commands,) = (
        action for action in root._actions if isinstance(action, argparse._SubParsersAction)
    )
    lines = ["# kubectl podgate", "", *_options(root)]
    for name, command in commands.choices.items():
        lines += ["", f"## kubectl podgate {name}", "", command.description or "", ""]
        lines += _options(command)
    return "\n".join(lines) + "\n"


def _options(parser: argparse.ArgumentParser) -> list[str]:
    lines = ["| option | description |", "|---|---|"]
    for action in parser._actions:
        if action.help and not isinstance(action, argparse._SubParsersAction):
            name = ", ".join(action.option_strings) or action.dest
            value = "" if action.nargs == 0 else f" {action.metavar or action.dest.upper()}"
            lines.append(f"| `{name}{value}` | {action.help} |")
    return lines


def _help(title: str, command: click.Command, context: click.Context) -> Iterator[str]:
    """Of a command and, if it is a group, of its commands."""
    yield _block(title, command.get_help(context))
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            inner_context = click.Context(inner, parent=context, info_name=name, terminal_width=96)
            yield from _help(f"{title} {name}", inner, inner_context)


def _block(title: str, text: str) -> str:
    return f"## {title}\n\n```\n{text}\n```"


def main() -> None:
    for name, content in pages().items():
        (ROOT / name).parent.mkdir(exist_ok=True)
        (ROOT / name).write_text(content, encoding="utf-8")
        sys.stderr.write(f"wrote {name}\n")


if __name__ == "__main__":
    main()
