"""The kernel side: the gate's C source, and what compiles, loads, pins, attaches and reads it.

Knows nothing of Kubernetes and of probes. Only `bpf.compiling` imports bcc, and only in a process
of its own that ends when the programs are pinned.
"""
