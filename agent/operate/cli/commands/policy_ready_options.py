"""Options for the condition `podgate.io/policy-ready` of `podgate run`."""

import functools
from collections.abc import Callable
from typing import Any

import click

from agent.operate.cli.commands import options
from agent.settings import PolicyReadyMode, PolicyReadySettings

_OPTIONS = (
    click.option(
        "--policy-ready",
        type=click.Choice([choice.value for choice in PolicyReadyMode]),
        default=PolicyReadyMode.OFF.value,
        show_default=True,
        help="Make the condition podgate.io/policy-ready of new pods True once the cluster's "
        "network policies are seen to be in force for them (wait), or also after the time-out "
        "(ready). Needs --node-name, and a witness on each node.",
    ),
    click.option(
        "--policy-ready-timeout",
        metavar="SECONDS",
        type=click.FloatRange(1, 86400),
        default=60.0,
        show_default=True,
        help="Time after which policies of a new pod that are not in force are a finding.",
    ),
)


def run_options(command: Callable[..., None]) -> Callable[..., None]:
    """Options of the condition; the command gets them as `policy_ready`."""

    @functools.wraps(command)
    def wrapped(
        *, node_name: str | None, policy_ready: str, policy_ready_timeout: float, **others: Any
    ) -> None:
        settings = PolicyReadySettings(PolicyReadyMode(policy_ready), policy_ready_timeout)
        if settings.mode is not PolicyReadyMode.OFF and node_name is None:
            raise click.UsageError(
                "--policy-ready needs --node-name: network policies are objects of a cluster"
            )
        command(node_name=node_name, policy_ready=settings, **others)

    return options.added(_OPTIONS, wrapped)
