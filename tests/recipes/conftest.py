"""One copy of the tree for all recipes of a worker."""

import pathlib
import shutil
from collections.abc import Callable, Iterator

import pytest

from tests.recipes.tree import ROOT, Tree

Recipe = Callable[[str, str], Tree]

# Whatever the checkout has besides, such as a virtual environment, takes no part.
_PARTS = ("agent", "bpf", "probes", "tests", "docs", "deploy")


@pytest.fixture(scope="session")
def copy(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    made = tmp_path_factory.mktemp("tree")
    for part in _PARTS:
        shutil.copytree(ROOT / part, made / part, symlinks=True)
    return made


@pytest.fixture
def recipe(copy: pathlib.Path) -> Iterator[Recipe]:
    """Makes the tree of a recipe, by its title and the new thing's name."""
    made: list[Tree] = []

    def make(title: str, name: str) -> Tree:
        made.append(Tree(title, name, copy))
        return made[-1]

    yield make
    for tree in made:
        tree.restore()
