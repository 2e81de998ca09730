"""Failures of kernel calls for one pod."""

import errno

_GONE = frozenset({errno.ENODEV, errno.ENOENT, errno.ENXIO})


def is_interface_gone(error: Exception) -> bool:
    """Whether the pod's interface does not exist any more."""
    cause = error if isinstance(error, OSError) else error.__cause__
    return isinstance(cause, OSError) and cause.errno == errno.ENODEV


def has_vanished(error: Exception) -> bool:
    """Whether the pod's interface or namespace disappeared meanwhile, which is no failure."""
    cause = error if isinstance(error, OSError) else error.__cause__
    return isinstance(cause, OSError) and cause.errno in _GONE
