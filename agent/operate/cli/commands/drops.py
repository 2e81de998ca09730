"""`podgate drops`."""

import asyncio
import contextlib
import datetime
import pathlib
import sys

import click

from agent.operate.cli.commands import options
from agent.settings import admin_socket

_MARK = "mark"


@click.command(
    short_help="List host processes whose traffic is dropped (in audit: would be dropped)."
)
@options.output
@options.namespace
@options.pod
@click.option(
    "--since",
    default="",
    help="Only what was seen since: 90m, 24h, 7d, or a time of UTC; 'mark': what was counted since "
    "--mark.",
)
@options.sort
@click.option("--top", type=click.IntRange(1), metavar="N", help="Only the first N sources.")
@click.option(
    "--mark",
    is_flag=True,
    help="List nothing, and remember the counts: '--since mark' shows only what follows.",
)
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
    top: int | None,
    mark: bool,
    follow: bool,
    end_with_input: bool,
    run_directory: pathlib.Path,
    bpffs: pathlib.Path,
) -> None:
    """List host processes whose traffic is dropped (in audit: would be dropped).

    One line per source, pod, protocol, port and mode, the busiest first: packets of audit have
    passed, those of enforce and strict were dropped. A source that scans a pod, by 16 or more
    ports, is one line. Then the containers that create raw or packet sockets of the host without a
    policy. With --follow one line per drop event, until interrupted; the kernel limits events to
    160 per second and CPU, and a line shows how many it suppressed.

    Without an agent the answer is read from the pinned BPF objects.
    """
    import msgspec

    from agent.admin.report import Drops
    from agent.operate.cli import answers, drops_mark
    from agent.operate.cli import output as screens
    from agent.operate.cli.views import drops as view
    from agent.operate.cli.views import drops_follow
    from agent.operate.pinned import drops as pinned_drops
    from bpf import pins

    chosen = options.PodFilter(namespace, pod)
    if follow:
        if since or sort or top or mark:
            raise click.UsageError(
                "--follow shows drops as they happen: no --since, --sort, --top or --mark"
            )
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
    if mark and (namespace or pod or since or sort or top):
        raise click.UsageError("--mark is of all sources: no filters, --sort or --top")
    now = datetime.datetime.now(datetime.UTC)
    first = None if since == _MARK else options.parse_since(since, now)
    found = answers.read(
        run_directory,
        "/drops",
        Drops,
        without_agent=lambda: pinned_drops.read(pins.Pins(bpffs), run_directory),
    )
    if mark:
        drops_mark.write(drops_mark.of(found, now), run_directory)
        at = screens.time_text(now)
        click.echo(f"Marked {at}; 'podgate drops --since mark' shows what follows.")
        return
    if since == _MARK:
        found = drops_mark.since(found, drops_mark.read(run_directory))
    sources = [one for one in found.sources if chosen.matches(one.namespace, one.pod)]
    if first:
        sources = [one for one in sources if one.last >= first]
    sources = screens.sort(sources, view.SOURCES, sort)
    found = msgspec.structs.replace(found, sources=sources[:top])
    omitted = sources[top:] if top else []
    screens.write(found, output, lambda screen: view.show(screen, found, omitted))
