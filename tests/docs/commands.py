"""Whether the commands of a page exist: their names and options, by the parsers of the programs."""

import argparse
import contextlib
import io
import re
import shlex
import subprocess
from collections.abc import Iterator, Sequence

import click

from agent.operate.cli import main as cli
from agent.operate.kubectl import main as plugin
from tests.docs.blocks import ROOT

_TARGET = re.compile(r"^([a-z][\w-]*):", re.MULTILINE)
_ENDS_A_COMMAND = re.compile(r"[|&;()]+")
_REDIRECTION = re.compile(r"[<>]+&?")
_ASSIGNMENT = re.compile(r"\w+=.*", re.DOTALL)
_WORDS_BEFORE = {"sudo", "until", "while", "do", "then", "if", "!", "exec", "nohup", "time"}
_HERE_DOCUMENT = re.compile(r"<<-? *'?(\w+)'?(.*)\n(?:.*\n)*?\1$", re.MULTILINE)


def problems(text: str) -> list[str]:
    """One sentence for each command of a shell text that does not exist as it is written."""
    checked = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True)
    if checked.returncode:
        return [checked.stderr.strip()]
    return [problem for argv in simple_commands(text) for problem in of_command(argv)]


def simple_commands(text: str) -> Iterator[list[str]]:
    """Program and arguments of each simple command, without redirections and here-documents."""
    text = _HERE_DOCUMENT.sub(r"\2", text).replace("\\\n", " ")
    for line in text.splitlines():
        words = shlex.shlex(line, posix=True, punctuation_chars=True)
        words.whitespace_split = True
        command: list[str] = []
        is_redirected = False
        for word in words:
            if _ENDS_A_COMMAND.fullmatch(word):
                yield from _stripped(command)
                command = []
            elif _REDIRECTION.match(word):
                is_redirected = True
                if command and command[-1].isdigit():
                    command.pop()
                continue
            elif not is_redirected:
                command.append(word)
            is_redirected = False
        yield from _stripped(command)


def of_command(argv: Sequence[str]) -> list[str]:
    """What is wrong with a command of podgate: `podgate`, `kubectl podgate` or `make`."""
    program, *arguments = argv
    name = program.rsplit("/", 1)[-1]
    if name == "podgate":
        return _click(cli.main, "podgate", arguments)
    if name == "kubectl" and arguments[:1] == ["podgate"]:
        return _argparse(plugin.parser(), arguments[1:])
    if name == "kubectl" and "exec" in arguments and "--" in arguments:
        return of_command(arguments[arguments.index("--") + 1 :])
    if name == "make":
        targets = set(_TARGET.findall((ROOT / "Makefile").read_text("utf-8")))
        named = {word for word in arguments if not word.startswith("-") and "=" not in word}
        return [f"make {target}: no such target" for target in sorted(named - targets)]
    return []


def _stripped(command: list[str]) -> Iterator[list[str]]:
    while command and (command[0] in _WORDS_BEFORE or _ASSIGNMENT.fullmatch(command[0])):
        command = command[1:]
    if command:
        yield command


def _click(
    command: click.Command, name: str, arguments: list[str], parent: click.Context | None = None
) -> list[str]:
    """By click's own parser, without running anything."""
    # With the parent's settings: a command keeps the help option that its first context has.
    context = click.Context(command, parent, info_name=name, **command.context_settings)
    try:
        values, rest, _ = command.make_parser(context).parse_args(list(arguments))
    except click.UsageError as error:
        return [f"{name}: {error.format_message()}"]
    for parameter in command.params:
        value = values.get(parameter.name or "")
        choices = parameter.type.choices if isinstance(parameter.type, click.Choice) else ()
        # Capital letters are a place for the reader's own.
        if choices and isinstance(value, str) and value not in choices and not value.isupper():
            return [f"{name}: {value!r} is not one of {', '.join(map(str, choices))}"]
    if not isinstance(command, click.Group) or not rest:
        return []
    inner = command.get_command(context, rest[0])
    if inner is None:
        return [f"{name}: no command {rest[0]!r}"]
    return _click(inner, f"{name} {rest[0]}", rest[1:], context)


def _argparse(parser: argparse.ArgumentParser, arguments: list[str]) -> list[str]:
    stderr = io.StringIO()
    with contextlib.redirect_stderr(stderr), contextlib.redirect_stdout(io.StringIO()):
        try:
            parser.parse_args(arguments)
        except SystemExit as error:
            if error.code:
                return [stderr.getvalue().strip().splitlines()[-1]]
    return []
