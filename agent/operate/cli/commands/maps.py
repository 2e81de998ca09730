"""`podgate maps`."""

import pathlib

import click

from agent.operate.cli.commands import options


@click.command(short_help="Show the pinned BPF maps, or the entries of one.")
@click.argument("name", required=False)
@options.output
@click.option("--raw", is_flag=True, help="Print what bpftool prints.")
@options.bpffs
def maps(name: str | None, output: options.Format, raw: bool, bpffs: pathlib.Path) -> None:
    """Show the pinned BPF maps with their sizes, or the decoded entries of map NAME.

    Needs no agent. Times are in nanoseconds of CLOCK_MONOTONIC; empty entries of arrays are left
    out. With --raw bpftool prints the maps, and its commands are printed as well.
    """
    from agent.operate.cli import output as screens
    from agent.operate.cli.views import maps as maps_view
    from agent.operate.pinned import maps as pinned_maps
    from bpf import pins

    found = pinned_maps.paths(pins.Pins(bpffs))
    if name is not None and name not in found:
        raise click.BadParameter(f"no map {name!r} is pinned; use one of {', '.join(found)}")
    if raw:
        maps_view.show_raw([found[name]] if name else list(found.values()), is_dump=bool(name))
    elif name is None:
        listed = pinned_maps.read(found)
        screens.write(listed, output, lambda screen: maps_view.show(listed, screen))
    else:
        content = pinned_maps.entries(found[name])
        screens.write(content, output, lambda screen: maps_view.show_entries(content, screen))
