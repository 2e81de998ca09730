"""Loads the eBPF programs in a thread, while the agent's modules are imported.

The kernel's verifier and Python take some tenths of a second each, on different CPUs.
"""

import asyncio
import concurrent.futures

from bpf import loader, pins
from bpf.pinning import Outcome

Loading = concurrent.futures.Future[Outcome]


def start(installation: pins.Pins) -> Loading:
    """The result is that of `loader.ensure_pinned`, or its error."""
    executor = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="loading")
    loading = executor.submit(lambda: asyncio.run(loader.ensure_pinned(installation, defers=True)))
    executor.shutdown(wait=False)
    return loading
