"""`podgate suggest`."""

import datetime
import pathlib
import sys
from typing import TYPE_CHECKING

import click

from agent.operate.cli.commands import options

if TYPE_CHECKING:
    from agent.admin.observations import Observations

_DROPPED, _UNUSED = 1, 4


@click.command(short_help="Generate HostAccessPolicies for traffic seen as dropped.")
@click.option(
    *("--namespace", "-n", "namespaces"),
    multiple=True,
    help="Only pods of this namespace; repeat it.",
)
@click.option("--pod", default="", help="Only this pod, and those with the same lasting labels.")
@options.since
@click.option(
    "--min-count",
    type=click.IntRange(min=1),
    metavar="N",
    default=1,
    show_default=True,
    help="Only sources with at least N packets to one port.",
)
@click.option(
    "--check",
    type=options.PATH,
    multiple=True,
    help="Compare with the policies of this file or directory instead; repeat it.",
)
@click.option(
    "--from",
    "observed",
    type=click.Path(allow_dash=True),
    help="Read what this command, with --output json, wrote on one or more nodes; - for standard "
    "input.",
)
@options.sort
@click.option(
    "--output",
    "-o",
    type=click.Choice(options.Format, case_sensitive=False),
    default=options.Format.YAML,
    show_default=True,
    help="Output format: yaml is policies, json and tables the observed traffic with its review.",
)
@options.run_directory
def suggest(
    namespaces: tuple[str, ...],
    pod: str,
    since: str,
    min_count: int,
    check: tuple[pathlib.Path, ...],
    observed: str | None,
    sort: str,
    output: options.Format,
    run_directory: pathlib.Path,
) -> None:
    """Print policies, as YAML for kubectl apply or --rules, that admit the host processes whose
    traffic was dropped (in audit: would have been), and that no policy admits yet.

    Each has the traffic that it is made from as comments: port, packets, first and last time,
    process. Policies that need a decision are commented out, with the reason: sources that were
    seen on one occasion only, the root cgroup, logins, scans, pods without labels. Review all of
    them: an intruder's traffic is suggested, too.

    With --check nothing is suggested. It prints the sources that the given policies would not
    admit (exit status 1), and the rules that have admitted nothing (4, if there is no such source).
    """
    from agent.operate.cli import output as screens
    from agent.operate.cli.views import suggestions as view
    from agent.policy import files
    from agent.policy.review import FlowFilter, Review

    nodes = _observations(observed, run_directory)
    until = max((node.until for node in nodes), default=datetime.datetime.now(datetime.UTC))
    first = options.parse_since(since, until)
    chosen = FlowFilter(frozenset(namespaces), pod, first, min_count)
    review = Review(nodes, chosen)
    if check:
        policies = [policy for path in check for policy in files.load(path)]
        dropped, unused = view.show_check(review, policies)
        sys.exit(_DROPPED if dropped else _UNUSED if unused else 0)
    if output is options.Format.YAML:
        view.show(review)
        return
    document = view.document(review)
    rows = screens.sort(document.flows, view.FLOWS, sort)
    screens.write(document, output, lambda screen: view.show_flows(screen, rows))


def _observations(observed: str | None, run_directory: pathlib.Path) -> "list[Observations]":
    import msgspec

    from agent.admin.observations import Observations
    from agent.operate.cli import answers

    if observed is None:
        return [answers.read(run_directory, "/observations", Observations)]

    class Written(msgspec.Struct):
        nodes: list[Observations]

    with click.open_file(observed, "rb") as stream:
        content = stream.read()
    try:
        found = msgspec.json.decode(content, type=Written | list[Written])
    except msgspec.MsgspecError as error:
        raise click.BadParameter(
            f"not the output of 'podgate suggest --output json': {error}", param_hint="--from"
        ) from error
    return [node for one in (found if isinstance(found, list) else [found]) for node in one.nodes]
