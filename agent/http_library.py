"""aiohttp: `from agent.http_library import aiohttp, web`, without what it reads as it is imported.

That is the machine's authorities, twice, for connections without a TLS context of their own, which
podgate does not make. And types of files, which it does not serve.
"""

import mimetypes
import ssl
import threading

_importer = threading.get_ident()


def _skip(context: ssl.SSLContext) -> None:
    """In place of `SSLContext.set_default_verify_paths`, for the thread of this import alone."""
    if threading.get_ident() != _importer:
        super(ssl.SSLContext, context).set_default_verify_paths()


mimetypes.knownfiles.clear()
ssl.SSLContext.set_default_verify_paths = _skip  # type: ignore[assignment]
try:
    import aiohttp
    from aiohttp import web
finally:
    del ssl.SSLContext.set_default_verify_paths

__all__ = ["aiohttp", "web"]
