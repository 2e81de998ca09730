"""The status page: the node's pods, probes, drops and problems as one HTML document."""
