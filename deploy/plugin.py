"""`python deploy/plugin.py FILE`: packs `kubectl podgate` into one executable file.

It needs Python 3.11 and kubectl, and nothing else; kubectl finds it as kubectl-podgate in PATH.
"""

import pathlib
import shutil
import sys
import tempfile
import zipapp

SOURCE = pathlib.Path(__file__).resolve().parents[1]


def pack(target: pathlib.Path) -> None:
    with tempfile.TemporaryDirectory() as made:
        root = pathlib.Path(made)
        (root / "agent").mkdir()
        shutil.copy(SOURCE / "agent/__init__.py", root / "agent")
        shutil.copytree(
            SOURCE / "agent/kubectl",
            root / "agent/kubectl",
            ignore=shutil.ignore_patterns("__pycache__"),
        )
        (root / "__main__.py").write_text(
            "import sys\n\nfrom agent.kubectl.main import main\n\nsys.exit(main())\n",
            encoding="ascii",
        )
        target.parent.mkdir(parents=True, exist_ok=True)
        zipapp.create_archive(root, target, interpreter="/usr/bin/env python3")


if __name__ == "__main__":
    pack(pathlib.Path(sys.argv[1]))
