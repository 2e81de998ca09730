"""Types of options of several commands, for argparse."""

import argparse


def seconds(text: str) -> float:
    """From one second to an hour."""
    found = float(text)
    if not 1 <= found <= 3600:
        raise argparse.ArgumentTypeError("1 to 3600 seconds")
    return found
