"""`podgate completion`."""

import click
from click import shell_completion

_VARIABLE = "_PODGATE_COMPLETE"


@click.command(short_help="Print a shell's completion script.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the completion script of a shell.

    \b
    bash: source <(podgate completion bash)
    zsh:  source <(podgate completion zsh)
    fish: podgate completion fish | source
    """
    kind = shell_completion.get_completion_class(shell)
    assert kind is not None
    root = context.find_root()
    # The source only: click's own way runs bash to check its version, and prints to stderr.
    made = kind(root.command, {}, "podgate", _VARIABLE)
    click.echo(made.source_template % made.source_vars())
