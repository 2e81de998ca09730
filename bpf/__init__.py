"""The kernel side: the gate's C source, and what compiles, loads, pins, attaches and reads it.

Knows nothing of Kubernetes and of probes. Only `bpf.compiler` imports bcc, and it runs in a process
of its own that ends when the programs are pinned.
"""
