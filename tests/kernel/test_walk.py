"""README's and the guides' commands for one machine, typed as they are, on a node in namespaces.

Each page starts in a network namespace without interfaces, with an empty /run and an empty BPF file
system, and ends with nothing of podgate in them.
"""

import os
import pathlib

import pytest

from tests import polling
from tests.docs import blocks, shell
from tests.docs.blocks import ROOT, WALKS
from tests.kernel import offers

pytestmark = pytest.mark.kernel

PAGES = [page for page in WALKS if blocks.of(page, "sandbox")]
# What a machine has, and a fresh network namespace has not.
_MACHINE = """
mount -t tmpfs tmpfs /run
mount -t bpf bpf /sys/fs/bpf
for directory in /etc/cni /opt/cni; do
    [ ! -d $directory ] || mount -t tmpfs tmpfs $directory
done
ip link set lo up
exec bash --norc
"""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_of_a_page_work_in_their_order(page: pathlib.Path, tmp_path: pathlib.Path) -> None:
    offers.need_netns_cookie()  # else a connect gets a timeout instead of EPERM
    if page.name == "README.md":
        offers.need_process_names()
    environment = {**os.environ, "TMPDIR": str(tmp_path), "NO_COLOR": "1", "COLUMNS": "80"}
    machine = ["unshare", "--net", "--mount", "sh", "-e", "-c", _MACHINE]
    with shell.started(machine, ROOT, environment) as typed:
        for block in blocks.of(page, "sandbox"):
            typed.follow(block)
        left = "ls -d /run/podgate /sys/fs/bpf/podgate 2>/dev/null; ip -br link show type veth"
        polling.wait_until("nothing is left", lambda: typed.run(left)[1] == "")
