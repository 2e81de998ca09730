"""`podgate programs`."""

import pathlib

import click

from agent.operate.cli.commands import options


@click.command(short_help="Show the pinned BPF programs, and the chains that they are in.")
@options.output
@click.option("--raw", is_flag=True, help="Print what bpftool prints.")
@options.bpffs
def programs(output: options.Format, raw: bool, bpffs: pathlib.Path) -> None:
    """Show the pinned BPF programs: run time, run count, memory, size and links.

    Then, in the order in which they run, all programs on gated interfaces and on cgroups, other
    projects' too. Needs bpftool and no agent, and prints the commands that it ran. The kernel
    counts runs only with 'sysctl kernel.bpf_stats_enabled=1'.
    """
    from agent.operate.cli import output as screens
    from agent.operate.cli.views import programs as programs_view
    from agent.operate.pinned import programs as pinned_programs
    from bpf import pins

    installation = pins.Pins(bpffs)
    if raw:
        for command, text in pinned_programs.raw(installation):
            click.echo(f"# {command}\n{text}", nl=not text.endswith("\n"))
        return
    report = pinned_programs.read(installation)
    screens.write(report, output, lambda screen: programs_view.show(report, screen))
