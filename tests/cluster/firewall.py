"""Another rule set of the node that blocks it from all pods."""

import contextlib
import subprocess
from collections.abc import Iterator

_PODS = "198.18.16.0/20"
_TABLE = "ip another-firewall"
# Of host processes only; forwarded packets pass.
_RULES = f"""
table {_TABLE} {{
    chain output {{
        type filter hook output priority filter; policy accept;
        ip daddr {_PODS} ct state new drop
    }}
}}
"""


@contextlib.contextmanager
def firewall() -> Iterator[None]:
    """Blocks the node's processes from all pods."""
    subprocess.run(["nft", "-f", "-"], input=_RULES, text=True, check=True, timeout=30)
    try:
        yield
    finally:
        subprocess.run(["nft", "delete", "table", *_TABLE.split()], check=True, timeout=30)
