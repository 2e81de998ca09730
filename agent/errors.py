"""The base of errors that users read. A class below it exists only where someone catches it."""

import errno

EXHAUSTED = (errno.EMFILE, errno.ENFILE)
"""Numbers of `OSError` of a process, and of a machine, without a free descriptor."""


class PodgateError(Exception):
    """An error for the user: its text is one sentence that names the cause and what to do."""


class PreflightError(PodgateError):
    """This machine lacks something that podgate needs."""


class AgentRequestError(PodgateError):
    """The agent did not answer a request as it should."""


class AgentUnreachableError(AgentRequestError):
    """No agent responds on its sockets: exit status 3 of the command line."""
