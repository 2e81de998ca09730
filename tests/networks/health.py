"""What the programs of networks report of themselves by HTTP."""

import urllib.error
import urllib.request


def is_healthy(url: str) -> bool:
    """Whether it responds with 200."""
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False
