"""`python -m agent` is `podgate`."""

from agent.cli.main import main

main(prog_name="podgate")
