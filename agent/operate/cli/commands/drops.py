"""`podgate drops`."""

import asyncio
import contextlib
import datetime
import pathlib
import sys

import click

from agent.operate.cli.commands import options
from agent.settings import admin_socket


@click.command(
    short_help="List host processes whose traffic is dropped (in audit: would be dropped)."
)
@options.output
@options.namespace
@options.pod
@options.since
@options.sort
@click.option("--follow", is_flag=True, help="Stream drop events (sampled).")
@click.option(
    "--end-with-input",
    is_flag=True,
    help="With --follow, end when standard input is closed, as by the end of kubectl exec --stdin.",
)
@options.run_directory
@options.bpffs
def drops(
    output: options.Format,
    namespace: str,
    pod: str,
    since: str,
    sort: str,
    follow: bool,
    end_with_input: bool,
    run_directory: pathlib.Path,
    bpffs: pathlib.Path,
) -> None:
    """List host processes whose traffic is dropped (in audit: would be dropped).

    One line per source, pod, protocol and port, the busiest first. Then the containers that create
    raw or packet sockets of the host without a policy. With --follow one line per drop
    event, until interrupted; the kernel limits events to 160 per second and CPU.

    Without an agent the answer is read from the pinned BPF objects.
    """
    import msgspec

    from agent.admin.report import Drops
    from agent.operate.cli import answers
    from agent.operate.cli import output as screens
    from agent.operate.cli.views import drops as view
    from agent.operate.cli.views import drops_follow
    from agent.operate.pinned import drops as pinned_drops
    from bpf import pins

    chosen = options.PodFilter(namespace, pod)
    if follow:
        if since or sort:
            raise click.UsageError("--follow shows drops as they happen: no --since or --sort")
        following = drops_follow.follow(
            admin_socket(run_directory),
            output,
            lambda event: chosen.matches(event.namespace, event.pod),
        )
        if end_with_input:
            following = drops_follow.until_end_of_input(following, sys.stdin.fileno())
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(following)
        return
    first = options.parse_since(since, datetime.datetime.now(datetime.UTC))
    found = answers.read(
        run_directory,
        "/drops",
        Drops,
        without_agent=lambda: pinned_drops.read(pins.Pins(bpffs), run_directory),
    )
    sources = [one for one in found.sources if chosen.matches(one.namespace, one.pod)]
    if first:
        sources = [one for one in sources if one.last >= first]
    found = msgspec.structs.replace(found, sources=screens.sort(sources, view.SOURCES, sort))
    screens.write(found, output, lambda screen: view.show(screen, found))
