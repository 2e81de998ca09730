"""`python -m agent` is `podgate`."""

from agent.cli import main

main(prog_name="podgate")
