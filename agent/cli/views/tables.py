"""Layout of tables, and names of pods in them."""

import rich.box
import rich.console
import rich.table

# Not a terminal: grep needs whole lines.
_PIPED_WIDTH = 160


def console() -> rich.console.Console:
    """A console as wide as the terminal, or wide if output is piped."""
    made = rich.console.Console()
    if not made.is_terminal:
        made.width = _PIPED_WIDTH
    return made


def table(*columns: str) -> rich.table.Table:
    made = rich.table.Table(box=rich.box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        made.add_column(column, overflow="fold")
    return made


def full_name(namespace: str, name: str) -> str:
    """ "namespace/name"; the name alone for an invalid manifest and for the relay."""
    return f"{namespace}/{name}" if namespace else name
