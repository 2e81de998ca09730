"""The control plane: pods, conditions, APIs, metrics, command line. Puts bpf and probes together."""
