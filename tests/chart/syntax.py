"""Parser of the part of Go's template language that the chart uses (Go's text/template/parse).

What is not in this part is an error, never ignored: what renders here renders the same by Helm, as
tests/chart/test_template.py and `make test-chart` show.
"""

import dataclasses
import re
from collections.abc import Iterable, Sequence

_ACTION = re.compile(r"\{\{(-\s)?\s*(.*?)\s*(\s-)?\}\}", re.DOTALL)
_TOKEN = re.compile(
    r'"(?:[^"\\]|\\.)*"|:=|[()|,=]|\$?[\w]*(?:\.\w+)+|\.|\$\w*|\w+',
)
_NAME = re.compile(r"[A-Za-z]\w*")


class TemplateError(Exception):
    """A template that cannot be parsed or rendered; the message names the file."""


@dataclasses.dataclass(frozen=True, slots=True)
class Literal:
    value: object


@dataclasses.dataclass(frozen=True, slots=True)
class Reference:
    """`.a.b`, `$.a.b` or `$name.a.b`. base: "." for dot, otherwise the variable with its $."""

    base: str
    path: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Function:
    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class Pipeline:
    """Commands, each of which gets the previous one's value as its last argument."""

    commands: tuple[tuple["Operand", ...], ...]


Operand = Literal | Reference | Function | Pipeline


@dataclasses.dataclass(frozen=True, slots=True)
class Output:
    """Text, or the value of a pipeline."""

    value: str | Pipeline


@dataclasses.dataclass(frozen=True, slots=True)
class Assignment:
    """`$name := value`. The chart changes no variable, so `=` is not supported."""

    variable: str
    value: Pipeline


@dataclasses.dataclass(frozen=True, slots=True)
class Branch:
    """if and with; the latter sets dot."""

    condition: Pipeline
    body: "Nodes"
    otherwise: "Nodes"
    sets_dot: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Loop:
    """range. variables: none, the value's, or the key's and the value's."""

    variables: tuple[str, ...]
    items: Pipeline
    body: "Nodes"


Node = Output | Assignment | Branch | Loop
Nodes = tuple[Node, ...]


def parse(text: str, file: str) -> tuple[Nodes, dict[str, Nodes]]:
    """The nodes of a file, and those of its named templates. Raises `TemplateError`."""
    parser = _Parser(text, file)
    nodes, end = parser.nodes()
    if end:
        raise TemplateError(f"{file}: {{{{ {end} }}}} without a beginning")
    return nodes, parser.defined


class _Parser:
    def __init__(self, text: str, file: str) -> None:
        self.defined: dict[str, Nodes] = {}
        self._file = file
        self._parts = _split(text)
        if any("{{" in content for is_action, content in self._parts if not is_action):
            raise TemplateError(f"{file}: {{{{ without }}}}")
        self._position = 0

    def nodes(self) -> tuple[Nodes, str]:
        """Nodes up to the end of the file or of the block, and what ended it."""
        found: list[Node] = []
        while self._position < len(self._parts):
            is_action, content = self._parts[self._position]
            self._position += 1
            if not is_action:
                found.append(Output(content))
                continue
            if content.startswith("/*"):
                continue
            word = content.partition(" ")[0]
            if word in ("end", "else"):
                return tuple(found), content
            rest = content.removeprefix(word).strip()
            if word in ("if", "with"):
                found.append(self._branch(word, rest))
            elif word == "range":
                found.append(self._loop(rest))
            elif word == "define":
                self.defined[rest.strip('"')] = self._body()
            else:
                found.append(self._statement(content))
        return tuple(found), ""

    def _branch(self, word: str, condition: str) -> Branch:
        parsed = self._pipeline(condition)
        body, end = self.nodes()
        otherwise: Nodes = ()
        if end.startswith("else if "):
            otherwise = (self._branch("if", end.removeprefix("else if ")),)
        elif end == "else":
            otherwise = self._body()
        elif end != "end":
            raise TemplateError(f"{self._file}: {{{{ {word} {condition} }}}} has no end")
        return Branch(parsed, body, otherwise, sets_dot=word == "with")

    def _loop(self, content: str) -> Loop:
        names, _, items = content.rpartition(":=")
        variables = tuple(name.strip() for name in names.split(",") if name.strip())
        return Loop(variables, self._pipeline(items), self._body())

    def _body(self) -> Nodes:
        found, end = self.nodes()
        if end != "end":
            raise TemplateError(f"{self._file}: a block ends with {{{{ {end} }}}}")
        return found

    def _statement(self, content: str) -> Node:
        if match := re.match(r"(\$\w+)\s*:=\s*", content):
            return Assignment(match[1], self._pipeline(content[match.end() :]))
        return Output(self._pipeline(content))

    def _pipeline(self, content: str) -> Pipeline:
        tokens = _TOKEN.findall(content)
        if "".join(tokens) != re.sub(r'\s+(?=(?:[^"]*"[^"]*")*[^"]*$)', "", content):
            raise TemplateError(f"{self._file}: {{{{ {content} }}}} is not supported")
        parsed, left = self._commands(tokens)
        if left or not all(parsed.commands):
            raise TemplateError(f"{self._file}: {{{{ {content} }}}} is not complete")
        return parsed

    def _commands(self, tokens: Sequence[str]) -> tuple[Pipeline, Sequence[str]]:
        commands: list[list[Operand]] = [[]]
        while tokens and tokens[0] != ")":
            token, tokens = tokens[0], tokens[1:]
            if token == "|":
                commands.append([])
            elif token == "(":
                inner, tokens = self._commands(tokens)
                if not tokens:
                    raise TemplateError(f"{self._file}: a parenthesis has no end")
                tokens = tokens[1:]
                commands[-1].append(inner)
            else:
                commands[-1].append(self._operand(token))
        return Pipeline(tuple(map(tuple, commands))), tokens

    def _operand(self, token: str) -> Operand:
        if token.startswith('"'):
            return Literal(token[1:-1].encode().decode("unicode_escape"))
        if token in ("true", "false"):
            return Literal(token == "true")
        if token.isdecimal():
            return Literal(int(token))
        if token[0] in ".$":
            base, *path = token.split(".")
            return Reference(base or ".", tuple(filter(None, path)))
        if _NAME.fullmatch(token):
            return Function(token)
        raise TemplateError(f"{self._file}: {token} is not supported")


def _split(text: str) -> list[tuple[bool, str]]:
    """Text (False) and actions (True), trimmed as {{- and -}} require."""
    parts: list[tuple[bool, str]] = []
    position, trims = 0, False
    for match in _ACTION.finditer(text):
        before = text[position : match.start()]
        before = before.lstrip() if trims else before
        parts += _texts(before.rstrip() if match[1] else before)
        parts.append((True, match[2]))
        position, trims = match.end(), bool(match[3])
    parts += _texts(text[position:].lstrip() if trims else text[position:])
    return parts


def _texts(text: str) -> Iterable[tuple[bool, str]]:
    return [(False, text)] if text else []
