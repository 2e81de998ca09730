"""Puts the client of services beside the other modules of `podgate_client`.

Its sources are agent/services/client, above those of agent/client, which they import by that name.
In the distribution both are one package, so the import becomes a relative one.
"""

import pathlib
import re
import tempfile
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_SERVICES = "../../agent/services/client"
_IMPORT = re.compile(r"^from agent\.client import", re.MULTILINE)


class ClientOfServices(BuildHookInterface):  # type: ignore[type-arg]
    """Adds its modules to the wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        self._made = tempfile.TemporaryDirectory()
        source = pathlib.Path(self.root, _SERVICES)
        for file in sorted(source.rglob("*")):
            # The __init__.py of both packages are those of agent/client.
            if file.suffix not in (".py", ".pyi", ".proto") or file.name == "__init__.py":
                continue
            path = file.relative_to(source)
            copy = pathlib.Path(self._made.name, path)
            copy.parent.mkdir(exist_ok=True)
            copy.write_text(_IMPORT.sub("from . import", file.read_text("utf-8")), "utf-8")
            build_data["force_include"][str(copy)] = f"podgate_client/{path}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        self._made.cleanup()
