"""`python -m tests.compatibility` writes docs/compatibility.md."""

from tests.compatibility import page

if __name__ == "__main__":
    page.write()
