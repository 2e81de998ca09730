"""What a kernel may lack without podgate being wrong on it: found out by trying, and said."""

import pytest

from bpf import tcx

# The kernel matrix counts tests that end with these words; any other skip is a failure there.
NOT_OFFERED = "not offered by this kernel: "


def need_tcx() -> None:
    """Ends the test where the kernel has no tcx; podgate attaches by clsact there."""
    if not tcx.TcxLinks.is_supported():
        pytest.skip(NOT_OFFERED + "tcx (Linux 6.6)")
