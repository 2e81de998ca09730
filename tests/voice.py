"""`python -m tests.voice`: holds words of the old dialect out of everything that people read.

Checked are strings, docstrings, comments and the names that code defines, comments and strings of
C, comments and texts of .proto and YAML, and Markdown outside of code. `make lint` runs it.
"""

import ast
import io
import os
import pathlib
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parents[1]

# As .gitignore; a checkout may be read where git is not installed.
_MADE_BY_TOOLS = re.compile(r"\..*|__pycache__|.*\.egg-info|build|dist")

# Good technical English; blanked before the search.
ALLOWED = re.compile(
    "|".join(
        (
            r"connections? (?:is |are |was |were |be )?refused",
            # A cell of docs/compatibility.md.
            r"refused, because",
            r"ECONNREFUSED|ERR_CONNECTION_REFUSED|REFUSED_STREAM|refused the (?:connection|stream)",
            r"(?:user|uid|group) nobody",
            r"stand-?ins?|stand-?by|stands? by|standing by|stand-?alone|stands? for",
            r"keep[- ]alive",
            r"so long as",
            r"(?:packets?|segments?|frames?|headers?|messages?) carr(?:y|ies|ied)",
            r"carried (?:in|by) (?:an?|the) (?:packet|segment|frame|header|message)s?",
            r"`[^`\n]*`",
        )
    ),
    re.IGNORECASE,
)
# What to write instead of each.
BANNED = {
    r"told|tells?|telling|untold": "published, reported, logged, passed",
    r"said|says?|saying|unsaid": "reported, specifies, states, shows",
    r"hears?|heard|unheard": "receives, is notified",
    r"asks?|asked|asking|unasked": "requests, queries, calls",
    r"whoever|whomever|nobody|somebody|everybody|anybody": "a process, client, user; no client",
    r"whom": "that, which",
    r"who of|processes of the node|anyone of the node|of the node's own": "host process",
    r"anew|thereby|thereof|as ever|for ever|for good|that very|so many": "again, forever, the same",
    r"of earlier|of before|of ours|once for all": "previous, our",
    r"stands|stood": "is attached, exists, is in force",
    r"(?:is|are|was|were|be|been) born|born closed|born in": "created",
    r"began|begun": "opened, started",
    r"(?:go|goes|went|gone) on": "continues, stays open",
    r"carried|carries on|carry on": "proxied, continues",
    r"lets? in|letting in|kept out|holds? out|held out|keeps? away": "admits, blocks",
    r"refuses?|refusals?|refusing|refused": "drops, rejects",
    r"openings|opening (?:packet|segment|datagram)s?|the opening": "SYN, new flow",
    r"look(?:s|ed|ing)? at|looked for": "reads, checks, inspects",
    r"(?:a|one|another|each|last|next|full|first) look": "pass, check",
    r"tak(?:e|es|en|ing) in|took in|taken for|taken up with": "handles, mistaken for",
    r"(?:c(?:o|a)mes?|became|becomes?|become) of": "result, outcome",
    r"what (?:it|they|this) c(?:o|a)mes? to": "result, outcome",
    r"'s word|word of mouth|whose word counts|own word": "report, value",
    r"news": "change, update",
    r"troubles?|wish(?:es)?|promises?|doorway|backstop": "problem, request, check",
    r"misplaced|unmanaged by others": "displaced",
    r"nothing to say|something to say": "has not reported yet",
    r"is there and|not there|is there(?=[.,;])": "exists, is missing",
    r"however (?:it|the \w+) is|be that as it may|hardly any": "(rewrite)",
    r"an \w+ too many|one too few": "(rewrite)",
}
# In the strings of the program, which are its messages, too.
BANNED_IN_STRINGS = {
    r"who": "process, user, client",
    r"the node(?='s own| started| begins| sends)": "the host",
    r"beside": "in addition to",
    r"so long|as long as": "this many hours, while",
    r"which way": "how",
}
NAMES = re.compile(
    r"(?:^|_)(?:told|tell|tells|teller|said|say|says|hear|heard|ask|asks|asked|asker|whoever|nobody"
    r"|caller|callers|sender|senders|opening|openings|refusal|refusals|refuse|refused|carried|carry"
    r"|wanted|want|wants|known|born|stand|stands|standing|anew|believed|judge|judged|news|doorway"
    r"|backstop|unsaid|untold|misplaced|earlier|older)(?:_|$)",
    re.IGNORECASE,
)
ALLOWED_NAMES = re.compile(r"connection_refused|ECONNREFUSED|^_?REFUSED$|well_known|known_hosts")

# Words that name a thing of somebody else's. (path, matched text)
EXCEPTIONS: frozenset[tuple[str, str]] = frozenset(
    {
        # An outcome of the relay: ECONNREFUSED by the pod.
        ("agent/relay/held_syns.py", "refused"),
        ("agent/relay/messages.py", "refused"),
        ("agent/relay/pending.py", "refused"),
        ("agent/strict/stats.py", "refused"),
        ("tests/agent/strict/test_stats.py", "refused"),
    }
)
SELF = "tests/voice.py"


class Text(NamedTuple):
    """A piece of prose, or a name."""

    line: int
    text: str
    kind: str


def _compiled(words: dict[str, str]) -> list[tuple[re.Pattern[str], str]]:
    return [
        (re.compile(rf"(?<![\w'-])(?:{pattern})(?![\w-])" if not pattern.startswith("'")
                    else rf"(?:{pattern})\b", re.IGNORECASE), instead)
        for pattern, instead in words.items()
    ]  # fmt: skip


_BANNED = _compiled(BANNED)
_BANNED_IN_STRINGS = _compiled(BANNED_IN_STRINGS)


def python_texts(source: str, *, is_test: bool) -> Iterator[Text]:
    """Of tests: docstrings, comments and names of functions. Their strings quote other programs."""
    nodes = list(ast.walk(ast.parse(source)))
    docstrings = set()
    for node in nodes:
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstrings |= _documentation(node)
        for line, name in _defined(node, is_test=is_test):
            yield Text(line, name, "name")
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if id(node) in docstrings:
                yield from _lines(node.lineno, node.value, "comment")
            elif not is_test:
                yield from _lines(node.lineno, node.value, "string")
    # Most of the time of a file that has none, before Python 3.12.
    tokens = tokenize.generate_tokens(io.StringIO(source).readline) if "#" in source else ()
    for token in tokens:
        if token.type == tokenize.COMMENT:
            yield Text(token.start[0], token.string, "comment")


def _documentation(
    node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef,
) -> set[int]:
    """Its docstring, and those below its fields."""
    return {
        id(statement.value)
        for statement in node.body
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    }


def _defined(node: ast.AST, *, is_test: bool) -> Iterator[tuple[int, str]]:
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            yield node.lineno, _snake(node.name)
        case _ if is_test:
            pass
        case ast.arg():
            yield node.lineno, node.arg
        case ast.Name(ctx=ast.Store()):
            yield node.lineno, node.id
        case ast.Attribute(ctx=ast.Store()):
            yield node.lineno, node.attr


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)


def c_texts(source: str) -> Iterator[Text]:
    """Comments and strings."""
    pattern = r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"'
    for match in re.finditer(pattern, source, re.DOTALL):
        line = source.count("\n", 0, match.start()) + 1
        kind = "string" if match[0].startswith('"') else "comment"
        if not source[source.rfind("\n", 0, match.start()) + 1 :].startswith("#include"):
            yield from _lines(line, match[0], kind)


def markdown_texts(source: str) -> Iterator[Text]:
    is_code = False
    for line, text in enumerate(source.splitlines(), 1):
        if text.lstrip().startswith("```"):
            is_code = not is_code
        elif not is_code:
            yield Text(line, text, "comment")


def other_texts(source: str) -> Iterator[Text]:
    """YAML, .proto, shell, Dockerfile: whole lines."""
    yield from _lines(1, source, "comment")


def _lines(first: int, text: str, kind: str) -> Iterator[Text]:
    for offset, line in enumerate(text.splitlines()):
        yield Text(first + offset, line, kind)


def texts(path: str, source: str) -> Iterator[Text]:
    suffix = pathlib.PurePath(path).suffix
    if suffix == ".py":
        return python_texts(source, is_test=path.startswith("tests/"))
    if suffix in (".c", ".h"):
        return c_texts(source)
    return markdown_texts(source) if suffix == ".md" else other_texts(source)


def problems(path: str, found: Iterable[Text]) -> Iterator[str]:
    prose = []
    for line, text, kind in found:
        if kind == "name":
            if NAMES.search(text) and not ALLOWED_NAMES.search(text):
                yield f"{path}:{line}: name {text}"
        else:
            prose.append(Text(line, ALLOWED.sub(" ", text), kind))
    # Of a file at once: few of the words are in it.
    whole = "\n".join(text for _, text, _ in prose)
    banned = [one for one in _BANNED if one[0].search(whole)]
    in_strings = [one for one in _BANNED_IN_STRINGS if one[0].search(whole)]
    for line, text, kind in prose:
        for pattern, instead in banned + (in_strings if kind == "string" else []):
            for match in pattern.finditer(text):
                if (path, match[0]) not in EXCEPTIONS:
                    yield f'{path}:{line}: "{match[0]}": write {instead}'


def files(arguments: list[str]) -> Iterator[str]:
    """All files with prose, or those below the paths given; not what tools made."""
    for path in sorted(str(found) for start in arguments or ["."] for found in _below(start)):
        name = pathlib.PurePath(path)
        has_prose = name.suffix in (".py", ".c", ".h", ".md", ".proto", ".yaml", ".sh", ".toml")
        if "_pb2" in name.name or name.parts[:2] == ("tests", "data") or path == SELF:
            continue
        if has_prose or name.name in ("Dockerfile", "Makefile"):
            yield path


def _below(start: str) -> Iterator[pathlib.Path]:
    if (ROOT / start).is_file():
        yield pathlib.Path(start)
    for directory, directories, names in os.walk(ROOT / start):
        directories[:] = [name for name in directories if not _MADE_BY_TOOLS.fullmatch(name)]
        for name in names:
            yield (pathlib.Path(directory) / name).relative_to(ROOT)


def main(arguments: list[str]) -> int:
    """Check everything, or the paths given."""
    count = 0
    for path in files(arguments):
        for problem in problems(path, texts(path, (ROOT / path).read_text(encoding="utf-8"))):
            sys.stdout.write(problem + "\n")
            count += 1
    if count:
        sys.stdout.write(f"{count} words to replace\n")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
