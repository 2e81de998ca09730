"""`python -m agent` is `podgate`."""

from agent.operate.cli.main import main

main(prog_name="podgate")
