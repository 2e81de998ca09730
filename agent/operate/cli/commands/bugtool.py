"""`podgate bugtool`."""

import asyncio
import datetime
import os
import pathlib
import sys

import click

from agent.operate.cli.commands import options


@click.command(short_help="Write an archive for a bug report.")
@click.option(
    "--output",
    "-o",
    metavar="FILE",
    default="",
    help="Archive to create; - for standard output. Default: podgate-bugtool-TIME.tar.gz here.",
)
@click.option(
    "--log-file",
    type=options.PATH,
    multiple=True,
    help="Log file of which the end is added. Those of podgate's containers are found.",
)
@options.run_directory
@options.bpffs
def bugtool(
    output: str,
    log_file: tuple[pathlib.Path, ...],
    run_directory: pathlib.Path,
    bpffs: pathlib.Path,
) -> None:
    """Write an archive (tar.gz) with what a bug report needs, with or without an agent.

    Reports and metrics of the agent, maps, programs, doctor, the default-deny table, the relay's
    network, the kernel's settings and recent logs. It has no tokens, no environment and no pod
    specs; manifest.json lists what is in it and what was left out. For a pod of the DaemonSet:
    kubectl exec POD -- podgate bugtool -o - > bugtool.tar.gz
    """
    from agent.admin import client as admin_client
    from agent.errors import AgentUnreachableError
    from agent.operate.cli import bugtool as archives
    from agent.operate.cli import bugtool_parts
    from agent.settings import admin_socket

    problem = ""
    try:
        asyncio.run(admin_client.fetch_version(admin_socket(run_directory)))
    except AgentUnreachableError as error:
        problem = str(error)
    parts = bugtool_parts.parts(run_directory, bpffs, is_agent_alive=not problem, logs=log_file)
    content, manifest = archives.collect(list(parts), agent=problem)
    if output == "-":
        sys.stdout.buffer.write(content)
        sys.stdout.flush()
        path = "standard output"
    else:
        now = datetime.datetime.now(datetime.UTC)
        path = output or f"podgate-bugtool-{now:%Y%m%dT%H%M%SZ}.tar.gz"
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(content)
    failed = [part for part in manifest.parts if part.problem]
    for part in failed:
        click.echo(f"podgate: {part.file}: {part.problem}", err=True)
    click.echo(
        f"{len(manifest.parts) - len(failed)} of {len(manifest.parts)} parts in {path} "
        f"({len(content) / 1024:.0f} KiB); manifest.json lists them.",
        err=True,
    )
