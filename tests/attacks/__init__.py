"""Attacks on a pod behind a gate, as one table: tests/attacks/kit.py.

tests/kernel/test_attacks.py runs its rows on a node with an agent, and `python -m tests.attacks`
writes it into docs/internals/attacks.md.
"""
