"""Errors whose message is one sentence for the user, and says what to do."""


class Unfit(Exception):
    """Something that podgate cannot do without is missing; the message says what to do."""
