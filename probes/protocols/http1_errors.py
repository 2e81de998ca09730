"""HTTP/1: the error of what cannot be sent or read."""

from probes.errors import ProbeError


class HttpError(ProbeError):
    """The response is not HTTP, or too long, or the request cannot be sent; the text is Go's."""
