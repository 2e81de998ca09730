"""The control plane: pods, conditions, APIs, metrics and the command line over bpf and probes."""

VERSION = "0.1.0"
