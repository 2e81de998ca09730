"""Output of `podgate suggest`."""

from collections.abc import Sequence
from typing import Any

import click
import msgspec

from agent.admin.observations import Observations, ObservedPod
from agent.drops.source_processes import protocol_word
from agent.listing import full_name
from agent.operate.cli.output import Column, Screen, Signal
from agent.operate.cli.views.sources import source_text
from agent.operate.flow_text import in_text, target_text
from agent.policy import suggested_yaml
from agent.policy.api_types import Policy
from agent.policy.review import Review, ReviewedFlows
from agent.policy.suggestions import Suggestion


class SuggestOutput(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """As JSON: `nodes` can be read again with --from, `flows` is the review of each."""

    nodes: list[Observations]
    flows: list[ReviewedFlows]
    policies: list[dict[str, Any]]
    """Those without a doubt."""


def show(review: Review) -> None:
    """Print suggestions as YAML, after what they are based on."""
    suggestions = review.suggestions()
    for sentence in suggested_yaml.spans(node.observations for node in review.nodes):
        click.echo(f"# {suggested_yaml.safe(sentence)}")
    if count := len(review.admitted()):
        click.echo(f"# Policies in force admit {count} of the observed flows by now.")
    if doubtful := sum(bool(suggestion.doubt) for suggestion in suggestions):
        click.echo(
            f"# {doubtful} suggestions need a decision and are commented out; to admit one, remove "
            "the first two characters of each of its lines."
        )
    if not suggestions:
        click.echo("podgate: no dropped traffic to generate a policy for.", err=True)
    click.echo(suggested_yaml.render(suggestions), nl=False)


def document(review: Review) -> SuggestOutput:
    return SuggestOutput(
        nodes=[node.observations for node in review.nodes],
        flows=review.flows(),
        policies=[
            msgspec.to_builtins(suggestion.policy)
            for suggestion in review.suggestions()
            if suggestion.policy and not suggestion.doubt
        ],
    )


def show_flows(screen: Screen, rows: list[ReviewedFlows]) -> None:
    """Print the observed traffic, and what follows from it."""
    if rows:
        screen.table(FLOWS, rows)
    else:
        screen.line("No dropped traffic has been observed.")


def _review_text(reviewed: ReviewedFlows) -> str:
    if reviewed.is_admitted:
        return "admitted by now"
    return reviewed.doubt or "policy suggested"


FLOWS: tuple[Column[ReviewedFlows], ...] = (
    Column("NODE", lambda row: row.node, is_wide=True),
    Column("POD", lambda row: full_name(row.flows.pod.namespace, row.flows.pod.name)),
    Column(
        "TO",
        lambda row: target_text(
            protocol_word(row.flows.protocol),
            row.flows.port,
            has_many_ports=row.flows.has_many_ports,
        ),
    ),
    Column("PACKETS", lambda row: row.flows.packets),
    Column("LAST", lambda row: row.flows.last),
    Column(
        "SOURCE",
        lambda row: in_text(
            row.flows.process, source_text(row.flows.cgroup, _pod_name(row.flows.source_pod))
        ),
        is_below=True,
    ),
    Column(
        "REVIEW",
        _review_text,
        is_below=True,
        signal=lambda row: Signal.SAFE if row.is_admitted else Signal.CAUTION,
    ),
)


def _pod_name(pod: ObservedPod | None) -> str:
    return full_name(pod.namespace, pod.name) if pod else ""


def show_check(review: Review, policies: Sequence[Policy]) -> tuple[bool, bool]:
    """Print what these policies would drop and what they admit for nothing; whether there is any of
    each."""
    suggestions = review.dropped(policies)
    staged = review.staged(policies)
    dropped = [one for one in suggestions if not one.doubt]
    doubtful = [one for one in suggestions if one.doubt]
    unused = review.unused(policies)
    if dropped:
        click.echo("Dropped under these policies:")
        _show_flows(dropped)
    if doubtful:
        click.echo("Dropped under these policies, and not suggested:")
        _show_flows(doubtful)
    if staged:
        click.echo("Dropped, since the policies that admit it have action Audit:")
        _show_flows(staged)
    if unused:
        click.echo("Rules that have admitted nothing:")
    for one in unused:
        rule = one.rule
        port = f"{rule.protocol_text} {rule.ports_text}"
        click.echo(suggested_yaml.safe(f"  {one.policy}: {rule.source} to {port}"))
    if not (dropped or staged or unused):
        exception = ", but for those above" if doubtful else ""
        click.echo(f"All observed sources are admitted{exception}, and all rules are used.")
    return bool(dropped or staged), bool(unused)


def _show_flows(suggestions: Sequence[Suggestion]) -> None:
    for suggestion in suggestions:
        for flows in suggestion.flows:
            pod = f"{flows.pod.namespace}/{flows.pod.name}".lstrip("/")
            source = suggested_yaml.source_text(flows)
            text = suggested_yaml.flows_text(flows)
            click.echo(f"  {source} to {suggested_yaml.safe(pod)}: {text}")
        if suggestion.doubt:
            click.echo(f"    {suggestion.doubt}")
