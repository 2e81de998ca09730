"""The reference pages of the node-local APIs are current, and each part has a comment."""

import pathlib
import subprocess
import sys

import pytest

from tests.docs import api_reference
from tests.docs.api_reference import PROTOS, ROOT

_DEFINITION = """
// A file.
syntax = "proto3";
package tried;
// A message.
message Tried {
  // A | B.
  Tried tried = 1;
  %s
  repeated string names = 2;
}
"""


def test_pages_are_current() -> None:
    pages = api_reference.pages()
    assert len(pages) == 3
    written = {name: (ROOT / name).read_text("utf-8") for name in pages}
    assert written == pages, "run 'make docs' and commit the result"


def test_generated_messages_are_current(tmp_path: pathlib.Path) -> None:
    subprocess.run(
        [
            *(sys.executable, "-m", "grpc_tools.protoc", "-I."),
            *(f"--python_out={tmp_path}", f"--pyi_out={tmp_path}"),
            *(str(path.relative_to(ROOT)) for path in PROTOS),
        ],
        cwd=ROOT,
        check=True,
        timeout=60,
    )
    generated = [path.relative_to(tmp_path) for path in tmp_path.rglob("*_pb2.py*")]
    assert len(generated) == 2 * len(PROTOS)
    for path in generated:
        written = (ROOT / path).read_bytes()
        assert written == (tmp_path / path).read_bytes(), "run 'make proto' and commit the result"


def test_package_directory_and_go_package_name_the_same_version() -> None:
    files = api_reference.descriptors(PROTOS, ROOT)
    assert len(files) == len(PROTOS) > 0
    for file in files:
        _, api, version = file.package.split(".")
        assert pathlib.Path(file.name).parent.name == version
        assert file.options.go_package == f"podgate.io/api/{api}/{version};{api}{version}"


@pytest.mark.parametrize("comment", ["// Names.", ""])
def test_part_without_a_comment_is_an_error(tmp_path: pathlib.Path, comment: str) -> None:
    definition = tmp_path / "tried.proto"
    definition.write_text(_DEFINITION % comment)
    (file,) = api_reference.descriptors([definition], tmp_path)
    if comment:
        page = api_reference.page(file)
        assert "| `tried` = 1 | [Tried](#tried) | A \\| B. |" in page
        assert "| `names` = 2 | list of string | Names. |" in page
    else:
        with pytest.raises(api_reference.UndocumentedError, match=r"Tried\.names has no comment"):
            api_reference.page(file)
