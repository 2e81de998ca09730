"""The kernel side: the C sources, and the code that compiles, loads, pins, attaches and reads them.

Independent of Kubernetes and of probes. Only `bpf.compiling` imports bcc, in a process of its own
that exits when the programs are pinned.
"""
