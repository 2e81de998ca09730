"""All hostile HTTP/1 answers, the same ones for the same seed.

`recorded/http1_answers.jsonl` has the kubelet's result of each: recorder.py records them,
tests/probes/protocols/test_recorded.py compares. A change of a case needs a new record.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence

from tests.probes.hostile import bodies, heads, targets
from tests.probes.hostile.answers import Case

SEED = 18

_SUBJECTS: tuple[Callable[[random.Random], Iterator[Case]], ...] = (
    heads.status_lines,
    heads.header_names,
    heads.header_values,
    heads.lengths,
    heads.encodings,
    bodies.chunks,
    heads.informational,
    bodies.bodies,
    bodies.endings,
    bodies.mutations,
    targets.redirects,
    targets.requests,
)


def cases(seed: int = SEED) -> list[Case]:
    """All cases, in the record's order."""
    chance = random.Random(seed)
    return [case for subject in _SUBJECTS for case in subject(chance)]


def digest(cases: Sequence[Case]) -> str:
    """What a record names its cases by."""
    return hashlib.sha256(repr(cases).encode()).hexdigest()
