"""Completion of the command line, as kubectl requests it of `kubectl_complete-podgate`.

kubectl runs that command with the words after `kubectl podgate`, the last of which is incomplete,
and expects one candidate per line, with its description behind a tab, and then cobra's directive
(k8s.io/kubectl/pkg/cmd/plugin_completion.go). The plugin is this command as well, by that name.
"""

import argparse
import contextlib
from collections.abc import Callable, Iterator, Sequence

from agent.operate.kubectl.cluster import Cluster, KubectlError

COMMAND = "kubectl_complete-podgate"
_NO_FILES = ":4"

_RESOURCES = {
    **{"NODE": "nodes", "--node": "nodes"},
    **{"NAMESPACE": "namespaces", "--namespace": "namespaces"},
    **{"POD": "pods", "--pod": "pods"},
}
"""By the metavar of an argument, or the name of an option."""


def candidates(
    parser: argparse.ArgumentParser,
    words: Sequence[str],
    cluster: Callable[[], Cluster],
) -> Iterator[str]:
    """For the last word. cluster: called only if names of objects are wanted."""
    *complete, last = words or [""]
    option: argparse.Action | None = None
    positionals = _positionals(parser)
    for word in complete:
        if option is not None:
            option = None
        elif word.startswith("-"):
            option = _taking_a_value(parser, word)
        elif positionals:
            action = positionals[0]
            if isinstance(action, argparse._SubParsersAction):
                if word not in action.choices:
                    return
                parser = action.choices[word]
                positionals = _positionals(parser)
            elif action.nargs not in ("*", "+", argparse.REMAINDER):
                positionals = positionals[1:]
    if option is not None:
        yield from _values(option, last, cluster)
    elif last.startswith("-"):
        for action in parser._actions:
            for text in action.option_strings:
                if text.startswith(last) and (len(text) > 2 or last != "-"):
                    yield _line(text, action.help)
    elif positionals:
        yield from _values(positionals[0], last, cluster)


def answer(
    parser: argparse.ArgumentParser, words: Sequence[str], cluster: Callable[[], Cluster]
) -> str:
    """What kubectl expects on standard output."""
    return "".join(f"{line}\n" for line in (*candidates(parser, words, cluster), _NO_FILES))


def _positionals(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return [action for action in parser._actions if not action.option_strings]


def _taking_a_value(parser: argparse.ArgumentParser, word: str) -> argparse.Action | None:
    """The option of this word, if the next word is its value."""
    for action in parser._actions:
        if word in action.option_strings and action.nargs != 0:
            return action
    return None


def _values(action: argparse.Action, last: str, cluster: Callable[[], Cluster]) -> Iterator[str]:
    if isinstance(action, argparse._SubParsersAction):
        for choice in action._choices_actions:
            if choice.dest.startswith(last):
                yield _line(choice.dest, choice.help)
        return
    if action.choices:
        yield from (str(one) for one in action.choices if str(one).startswith(last))
        return
    for word in action.option_strings or [str(action.metavar)]:
        if (resource := _RESOURCES.get(word)) is None:
            continue
        with contextlib.suppress(KubectlError):  # completion has no place for a message
            for name in cluster().names(resource):
                if name.startswith(last):
                    yield name


def _line(text: str, description: str | None) -> str:
    return f"{text}\t{description}" if description else text
