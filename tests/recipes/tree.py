"""Recipes of CONTRIBUTING.md, and a copy of the tree in which each of their steps is taken."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]
PAGE = ROOT / "CONTRIBUTING.md"

_STEP = re.compile(r"^\d+\. `([\w./]+)`", re.MULTILINE)


class StepError(Exception):
    """A step that cannot be taken as the page has it."""


def steps(title: str) -> list[str]:
    """The files of a recipe's steps, in order; NAME in one stands for the new thing's name.

    Raises `StepError`.
    """
    part = PAGE.read_text("utf-8").partition("\n## Recipes\n")[2].partition("\n## ")[0]
    for section in part.split("\n### ")[1:]:
        if section.splitlines()[0] == title:
            return _STEP.findall(section)
    raise StepError(f"{PAGE.name} has no recipe {title!r}.")


class Tree:
    """A copy of the tree, for one recipe. name: of the new thing."""

    def __init__(self, title: str, name: str, copy: pathlib.Path) -> None:
        self.title = title
        self.root = copy
        self._open = [path.replace("NAME", name) for path in steps(title)]
        self._taken: list[str] = []

    def restore(self) -> None:
        """As it was, for the next recipe. With the times of the files, by which Python knows what
        it has compiled."""
        for path in self._taken:
            (self.root / path).unlink(missing_ok=True)
            if (ROOT / path).exists():
                shutil.copy2(ROOT / path, self.root / path)

    def edit(self, path: str, *changes: tuple[str, str]) -> None:
        """Take the next step in an existing file: insert each text behind the lines before it.

        Raises `StepError`: the page has another step here, or it has not these lines once.
        """
        file = self._take(path)
        text = file.read_text("utf-8")
        for place, inserted in changes:
            if text.count(place) != 1:
                raise StepError(f"{path} has {text.count(place)} places {place!r}.")
            text = text.replace(place, place + inserted)
        file.write_text(text, "utf-8")

    def add(self, path: str, text: str) -> None:
        """Take the next step: write a file. Raises `StepError`."""
        file = self._take(path)
        if file.exists():
            raise StepError(f"{path} exists.")
        file.write_text(text, "utf-8")

    def run(self, program: str, *arguments: str) -> str:
        """What a program prints in the copy, once all steps are taken. Raises `StepError`."""
        if self._open:
            raise StepError(f"Steps are left: {', '.join(self._open)}.")
        # Nothing of the checkout, nor of a run that measures coverage.
        environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(self.root)}
        command = (sys.executable, "-c", program, *arguments)
        ended = subprocess.run(
            command, cwd=self.root, env=environment, capture_output=True, text=True, timeout=100
        )
        if ended.returncode:
            raise StepError(f"{self.title}: {ended.stderr}{ended.stdout}")
        return ended.stdout

    def _take(self, path: str) -> pathlib.Path:
        if self._open[:1] != [path]:
            raise StepError(f"The next step of {self.title!r} is {self._open[:1]}, not {path}.")
        del self._open[0]
        self._taken.append(path)
        return self.root / path
