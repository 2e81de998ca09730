"""Mutation tests: `make mutants` changes podgate's code, and shows the changes no test detects.

cosmic-ray makes the mutants; this package chooses them, and the tests that each of them runs.
"""
