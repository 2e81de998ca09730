"""The option -o: a result as a table, or whole as JSON or YAML."""

import argparse
import json
from collections.abc import Iterator, Sequence

from agent.operate.kubectl import printing

TABLE, WIDE, JSON, YAML = FORMATS = ("table", "wide", "json", "yaml")


def add_option(
    parser: argparse.ArgumentParser, formats: Sequence[str] = FORMATS, default: str = TABLE
) -> None:
    parser.add_argument(
        "--output",
        "-o",
        choices=formats,
        default=default,
        metavar="FORMAT",
        help=f"{', '.join(formats[:-1])} or {formats[-1]} (default: {default}).",
    )


def write(value: object, form: str) -> None:
    """Print a value of JSON's types as JSON or YAML."""
    if form == JSON:
        printing.line(json.dumps(value, indent=2, ensure_ascii=False))
    else:
        printing.line("\n".join(yaml_lines(value)))


def yaml_lines(value: object) -> Iterator[str]:
    """A value of JSON's types as block YAML; strings are quoted as in JSON, so none is mistaken for
    another type."""
    if isinstance(value, dict) and value:
        for key, one in value.items():
            yield from _entry(f"{_scalar(str(key))}:", one)
    elif isinstance(value, list) and value:
        for one in value:
            lines = yaml_lines(one)
            yield f"- {next(lines)}"
            yield from (f"  {text}" for text in lines)
    else:
        yield _scalar(value)


def _entry(key: str, value: object) -> Iterator[str]:
    if isinstance(value, (dict, list)) and value:
        yield key
        yield from (f"  {text}" for text in yaml_lines(value))
    else:
        yield f"{key} {_scalar(value)}"


def _scalar(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    if isinstance(value, str):
        if value.isidentifier() and value.isascii() and value.lower() not in _WORDS:
            return value
        # JSON's strings are YAML's, but for characters that YAML wants escaped (YAML 1.2, 5.1);
        # none of these is printable.
        text = "".join(one if one.isprintable() else f"\\U{ord(one):08x}" for one in text)
    return text


# Other types of YAML 1.1, which many readers still use.
_WORDS = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null"})


def camel(thing: dict[str, object]) -> dict[str, object]:
    """Fields of a dataclass with the names that they have in JSON."""
    return {_camel(name): value for name, value in thing.items()}


def _camel(name: str) -> str:
    first, *others = name.split("_")
    return first + "".join(map(str.capitalize, others))
