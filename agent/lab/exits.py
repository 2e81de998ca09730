"""The end of processes that others have started."""

import os
import select


def has_ended(pid: int) -> bool:
    """Whether the process and all its threads have exited; its parent may not have waited yet.

    Its namespaces vanish before: the kernel closes descriptors last (`do_exit` in kernel/exit.c),
    and so detaches links.
    """
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        exits = select.poll()
        exits.register(descriptor, select.POLLIN)
        return bool(exits.poll(0))
    finally:
        os.close(descriptor)
