"""The base of this package's errors: each text is one sentence, and every class is caught."""


class ProbeError(Exception):
    """Base of all errors of probes."""
