"""The command line: its commands, what they show, and `podgate doctor`."""
