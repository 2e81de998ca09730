"""The reply table of one gate."""

from bpf import errors
from bpf.gates import Gates


def start_reply_table(gates: Gates, ifindex: int) -> bool:
    """As `Gates.start_reply_tables`, for one gate. Raises `AttachError`."""
    result = gates.start_reply_tables([ifindex])[ifindex]
    if isinstance(result, errors.AttachError):
        raise result
    return result
