"""`podgate status`."""

import pathlib

import click

from agent.errors import AgentUnreachableError
from agent.operate.cli.commands import options


@click.command()
@options.output
@options.namespace
@options.pod
@options.sort
@options.run_directory
@options.bpffs
def status(
    output: options.Format,
    namespace: str,
    pod: str,
    sort: str,
    run_directory: pathlib.Path,
    bpffs: pathlib.Path,
) -> None:
    """Show the agent's state and all pods.

    Without an agent: the gates as the kernel has them, the age of the agent's heartbeat, and what
    opens when, read from the pinned BPF objects. JSON and YAML have another form then.
    """
    import msgspec

    from agent.admin import finding
    from agent.admin.report import AgentReport
    from agent.operate.cli import answers
    from agent.operate.cli import output as screens
    from agent.operate.cli.views import pinned_status as pinned_view
    from agent.operate.cli.views import status as view
    from agent.operate.pinned import status as pinned_status
    from bpf import pins

    chosen = options.PodFilter(namespace, pod)
    try:
        report = answers.read(run_directory, "/status", AgentReport)
    except AgentUnreachableError as error:
        reason = str(error)
        found = answers.read_pins(
            error,
            lambda: pinned_status.read(pins.Pins(bpffs), run_directory, agent=reason),
        )
        gates = [one for one in found.gates if chosen.matches(one.namespace, one.pod)]
        found = msgspec.structs.replace(
            found,
            gates=screens.sort(gates, pinned_view.GATES, sort),
            findings=finding.chosen(found.findings, chosen.matches_full),
        )
        screens.write(found, output, lambda screen: pinned_view.show(screen, found))
        return
    pods = [one for one in report.pods if chosen.matches(one.namespace, one.name)]
    report = msgspec.structs.replace(
        report,
        pods=screens.sort(pods, view.PODS, sort),
        findings=finding.chosen(report.findings, chosen.matches_full),
    )
    screens.write(report, output, lambda screen: view.show(screen, report))
