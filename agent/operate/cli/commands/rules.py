"""`podgate rules`."""

import pathlib

import click

from agent.operate.cli.commands import options


@click.command(short_help="Show the rules in force, their pods and their hits.")
@options.output
@options.namespace
@options.pod
@options.sort
@options.run_directory
@options.bpffs
def rules(
    output: options.Format,
    namespace: str,
    pod: str,
    sort: str,
    run_directory: pathlib.Path,
    bpffs: pathlib.Path,
) -> None:
    """Show each rule of each policy in force: its pods, hits and problems.

    JSON and YAML have policies with their rules, and --sort does not change their order. Without an
    agent the answer is read from the pinned BPF objects, which have no names of policies.
    """
    from agent.admin.report import RulesReport
    from agent.operate.cli import answers
    from agent.operate.cli import output as screens
    from agent.operate.cli.views import rules as view
    from agent.operate.pinned import rules as pinned_rules
    from bpf import pins

    report = answers.read(
        run_directory,
        "/rules",
        RulesReport,
        without_agent=lambda: pinned_rules.read(pins.Pins(bpffs), run_directory),
    )
    report = view.chosen(report, options.PodFilter(namespace, pod))
    rows = screens.sort(view.rows(report.policies), view.RULES, sort)
    screens.write(report, output, lambda screen: view.show(screen, report, rows))
