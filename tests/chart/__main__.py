"""`python -m tests.chart` writes what is made of the chart; a test fails if it is not current."""

import sys

from tests.chart import outputs, rendering


def main() -> None:
    for path, content in outputs.files().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
        sys.stderr.write(f"wrote {path.relative_to(rendering.ROOT)}\n")


if __name__ == "__main__":
    main()
