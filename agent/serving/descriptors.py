"""File descriptors: every process uses as many as the machine lets it."""

import resource

# Servers hold some thousands (`Limits`), a node's pods some for each. A limit of a million is no
# use: memory would end first.
_MOST = 65_536


def raise_limit() -> int:
    """Raise the soft limit of this process, to 1,024 in most containers, as far as it goes; returns
    the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    raised = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft == resource.RLIM_INFINITY or soft >= raised:
        return soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
    return raised
