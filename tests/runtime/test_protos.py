"""What is generated from our excerpts of other programs' APIs is current."""

import pathlib
import subprocess
import sys

_ROOT = pathlib.Path(__file__).parents[2]


def test_generated_messages_match_their_proto_files(tmp_path: pathlib.Path) -> None:
    protos = [
        str(path.relative_to(_ROOT))
        for room in ("agent", "tests")
        for path in (_ROOT / room).rglob("*.proto")
    ]
    assert protos
    subprocess.run(
        [
            *(sys.executable, "-m", "grpc_tools.protoc", "-I."),
            *(f"--python_out={tmp_path}", f"--pyi_out={tmp_path}", *protos),
        ],
        cwd=_ROOT,
        check=True,
        timeout=60,
    )
    for path in tmp_path.rglob("*_pb2.py*"):
        name = path.relative_to(tmp_path)
        assert (_ROOT / name).read_text() == path.read_text(), f"{name}: run `make proto`"
