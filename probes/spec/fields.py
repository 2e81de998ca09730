"""Reading a decoded manifest: each problem is recorded with its path, and none ends the reading."""

from collections.abc import Iterator, Mapping, Sequence

import msgspec

_INT32_MAX = 2**31 - 1


class FieldProblem(msgspec.Struct, frozen=True):
    """One problem in a spec."""

    path: str
    """The field's path, such as `spec.containers[0].readinessProbe.httpGet.port`."""
    reason: str
    """CamelCase, fit for a condition: `InvalidProbe`, `ProbeHostNotAllowed`, `InvalidPod`."""
    message: str
    """One sentence that starts with the path."""


class Fields:
    """One object of the manifest, or any other value in its place.

    Each reader returns a usable value, even after recording a problem: the caller checks at the end
    whether there were problems.
    """

    def __init__(
        self, value: object, path: str, errors: list[FieldProblem], *, reason: str = "InvalidProbe"
    ) -> None:
        self.path = path
        self.errors = errors
        self.reason = reason
        self._values: Mapping[object, object] = {}
        if isinstance(value, Mapping):
            self._values = value
        elif value is not None:
            self.add_problem(None, f"must be an object, not {_kind(value)}")
            # Reported once: missing fields in it need no report.
            self.errors = []

    def add_problem(self, name: str | None, complaint: str, *, reason: str | None = None) -> None:
        """Record that the field `name` (None: the object itself) is wrong."""
        path = self.at(name) if name else self.path
        self.errors.append(FieldProblem(path, reason or self.reason, f"{path} {complaint}."))

    def at(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name

    def has(self, name: str) -> bool:
        """Whether the field is given; null counts as not given, as in the API."""
        return self._values.get(name) is not None

    def raw(self, name: str) -> object:
        return self._values.get(name)

    def child(self, name: str, *, reason: str | None = None) -> "Fields":
        return Fields(
            self._values.get(name), self.at(name), self.errors, reason=reason or self.reason
        )

    def children(self, name: str) -> "Iterator[Fields]":
        """The objects of a list; nothing if the field is not given."""
        for index, value in enumerate(self.items(name)):
            path = f"{self.at(name)}[{index}]"
            if value is None:
                value = "null"
            yield Fields(value, path, self.errors, reason=self.reason)

    def items(self, name: str) -> Sequence[object]:
        value = self._values.get(name)
        if value is None:
            return ()
        if isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray):
            return value
        self.add_problem(name, f"must be a list, not {_kind(value)}")
        return ()

    def text(self, name: str, default: str = "") -> str:
        value = self._values.get(name)
        if value is None:
            return default
        if isinstance(value, str):
            return value
        self.add_problem(name, f"must be a string, not {_kind(value)}")
        return default

    def flag(self, name: str) -> bool:
        value = self._values.get(name)
        if value is None or isinstance(value, bool):
            return bool(value)
        self.add_problem(name, f"must be true or false, not {_kind(value)}")
        return False

    def integer(self, name: str, *, default: int, minimum: int) -> int:
        """A whole number of the API: int32, at least `minimum`."""
        value = self._values.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            self.add_problem(name, f"must be a whole number, not {_kind(value)}")
        elif value < minimum:
            self.add_problem(name, f"must be at least {minimum}, not {value}")
        elif value > _INT32_MAX:
            self.add_problem(name, f"must be at most {_INT32_MAX}")
        else:
            return value
        return default

    def choice(self, name: str, choices: Sequence[str]) -> str:
        """One of `choices`, by exact spelling; the first is the default."""
        value = self.text(name) or choices[0]
        if value in choices:
            return value
        self.add_problem(name, f"must be {' or '.join(choices)}, not {clipped(value)}")
        return choices[0]


def clipped(text: str) -> str:
    """User text quoted for a message, short enough for a log line and a condition."""
    return repr(text if len(text) <= 64 else text[:61] + "...")


def _kind(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return f"the number {clipped(str(value))[1:-1]}" if _printable(value) else "a number"
        case str():
            return f"the string {clipped(value)}"
        case bytes() | bytearray():
            return "binary data"
        case Mapping():
            return "an object"
        case Sequence():
            return "a list"
        case _:
            return f"a {type(value).__name__}"


def _printable(value: int | float) -> bool:
    # CPython does not print integers of more than 4300 digits.
    return isinstance(value, float) or value.bit_length() <= 256
