"""`python -m tests.attacks`: writes docs/internals/attacks.md, as a part of `make docs`."""

from tests.attacks import page

page.PAGE.write_text(page.render(page.PAGE.read_text(encoding="utf-8")), encoding="utf-8")
