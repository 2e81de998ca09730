"""How many files a process may open."""

import resource

import pytest

from agent.serving import descriptors

INFINITE = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("soft", "hard", "limit", "is_set"),
    [
        (1024, 4096, 4096, True),
        (1024, 65_536, 65_536, True),
        (1024, 1 << 20, 65_536, True),
        (1024, INFINITE, 65_536, True),
        (4096, 4096, 4096, False),
        (65_536, 1 << 20, 65_536, False),
        (1 << 20, 1 << 20, 1 << 20, False),
        (1 << 20, INFINITE, 1 << 20, False),
        (INFINITE, INFINITE, INFINITE, False),
    ],
)
def test_limit_is_raised_as_far_as_it_is_of_use(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, limit: int, *, is_set: bool
) -> None:
    calls: list[tuple[int, tuple[int, int]]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, both: calls.append((kind, both)))
    assert descriptors.raise_limit() == limit
    assert calls == ([(resource.RLIMIT_NOFILE, (limit, hard))] if is_set else [])
