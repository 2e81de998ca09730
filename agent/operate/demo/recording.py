"""Records the demo as a picture: `python -m agent.operate.demo.recording FILE.svg`.

It runs the demo and draws what a terminal of 80 columns shows. The picture uses no other resource.
"""

import pathlib
import re
import sys

import rich.console

from agent.operate.demo import supervisor
from agent.operate.demo.view import TextView

_COLUMNS = 80
# rich's pictures load a font from a server; any fixed-width font has the same layout.
_FONTS = re.compile(r"@font-face\s*\{[^}]*\}\s*")


def main() -> None:
    console = rich.console.Console(
        record=True,
        force_terminal=True,
        width=_COLUMNS,
        color_system="truecolor",
        highlight=False,
    )
    status = supervisor.run(TextView(console, is_live=False))
    if status == 0:
        picture = _FONTS.sub("", console.export_svg(title="make demo"))
        pathlib.Path(sys.argv[1]).write_text(picture.replace("Fira Code", "monospace"), "utf-8")
    sys.exit(status)


if __name__ == "__main__":
    main()
