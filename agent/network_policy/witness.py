"""The witness's process, `python3 -m agent.network_policy.witness`: it keeps its pod's network
namespace, and ends at SIGTERM, which the kernel does not deliver to the first process of a pod that
neither handles nor blocks it (signal(7))."""

import signal

if __name__ == "__main__":
    ENDS = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDS)
    signal.sigwait(ENDS)
