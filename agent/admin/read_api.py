"""Names of the read-only API, for the agent that serves it and the plugin that reads it."""

PATH = "/read"
"""The non-resource URL: a client that may get it reads the pods of all namespaces."""
AUDIENCE = "podgate.io/agent"
"""Of tokens: the API server and all other servers reject them."""
TOKEN_HEADER = "X-Podgate-Token"  # noqa: S105  a header's name
ACCOUNT = "podgate-view"
"""The service account whose token readers send: in podgate's namespace one that may get `PATH`, in
another one that may get the pods there."""
