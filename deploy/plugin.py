"""`python deploy/plugin.py FILE`: packs `kubectl podgate` into one executable file.

It needs Python 3.11 and kubectl, and nothing else; kubectl finds it as kubectl-podgate in PATH. A
link named kubectl_complete-podgate beside FILE is what kubectl's completion runs.
"""

import pathlib
import shutil
import sys
import tempfile
import zipapp

_MODULES = (
    *("agent/labels.py", "agent/listing.py", "agent/admin/read_api.py"),
    *("agent/operate/flow_text.py", "agent/operate/text.py"),
)
SOURCE = pathlib.Path(__file__).resolve().parents[1]

# Any Python compiles it, also 2.7.
_MAIN = """\
import os
import sys

if sys.version_info < (3, 11):
    sys.stderr.write(
        "kubectl podgate: it needs Python 3.11 or newer, and python3 (%s) is %d.%d; "
        "put a newer one first in PATH\\n" % ((sys.executable,) + tuple(sys.version_info[:2]))
    )
    sys.exit(1)

from agent.operate.kubectl import completion, main

if os.path.basename(sys.argv[0]) == completion.COMMAND:
    sys.exit(main.complete(sys.argv[1:]))
sys.exit(main.main())
"""


def pack(target: pathlib.Path) -> None:
    with tempfile.TemporaryDirectory() as made:
        root = pathlib.Path(made)
        for package in ("agent", "agent/admin", "agent/operate"):
            (root / package).mkdir()
            shutil.copy(SOURCE / package / "__init__.py", root / package)
        for module in _MODULES:
            shutil.copy(SOURCE / module, root / module)
        for package in ("agent/admin/finding_kinds", "agent/operate/kubectl"):
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(SOURCE / package, root / package, ignore=ignored)
        (root / "__main__.py").write_text(_MAIN, encoding="ascii")
        target.parent.mkdir(parents=True, exist_ok=True)
        zipapp.create_archive(root, target, interpreter="/usr/bin/env python3")


if __name__ == "__main__":
    made = pathlib.Path(sys.argv[1])
    pack(made)
    link = made.with_name("kubectl_complete-podgate")
    link.unlink(missing_ok=True)
    link.symlink_to(made.name)
