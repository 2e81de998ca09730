"""Log lines of kernel calls that failed for one pod."""

import errno

import structlog

from agent.logs import Event
from agent.pods.pod import Pod

log = structlog.get_logger(__name__)

_GONE = frozenset({errno.ENODEV, errno.ENOENT, errno.ENXIO})


def log_failure(event: Event, pod: Pod, error: Exception) -> None:
    """An error, unless the pod's interface or namespace disappeared meanwhile."""
    cause = error if isinstance(error, OSError) else error.__cause__
    if isinstance(cause, OSError) and cause.errno in _GONE:
        log.info(Event.POD_VANISHED, pod=pod.full_name, error=str(error))
    else:
        log.error(event, pod=pod.full_name, error=str(error))
