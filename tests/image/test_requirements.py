"""The image installs the dependencies of podgate, with hashes, in the versions that tests have."""

import importlib.metadata
import re
import tomllib

import pytest

from tests.image import building

_REQUIREMENTS = building.ROOT / "deploy" / "requirements.txt"
_CONSTRAINTS = building.ROOT / "deploy" / "constraints.txt"
_DIGEST = re.compile(r"--hash=sha256:([0-9a-f]{64})")


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _required() -> dict[str, tuple[str, list[str]]]:
    """Version and hashes of each package."""
    found = {}
    text = _REQUIREMENTS.read_text(encoding="utf-8").replace("\\\n", " ")
    for line in text.splitlines():
        if not line.startswith("#"):
            name, version, *_ = re.split(r"==|\s", line)
            found[_normal(name)] = (version, _DIGEST.findall(line))
    return found


def _constraints() -> dict[str, str]:
    lines = _CONSTRAINTS.read_text(encoding="utf-8").splitlines()
    pairs = (line.split("==") for line in lines if line)
    return {_normal(name): version for name, version in pairs}


def test_every_dependency_is_required() -> None:
    text = (building.ROOT / "pyproject.toml").read_text(encoding="utf-8")
    project = tomllib.loads(text)["project"]
    todo = [*project["dependencies"], *project["optional-dependencies"]["otlp"]]
    names: set[str] = set()
    while todo:
        requirement, _, marker = todo.pop().partition(";")
        name = _normal(re.split(r"[^\w.-]", requirement, maxsplit=1)[0])
        # Those of extras, of other systems and of older Pythons are not installed.
        if name not in names and not marker:
            names.add(name)
            todo += importlib.metadata.requires(name) or ()
    assert len(names) > 30
    assert names <= _required().keys(), "run `python deploy/requirements.py`"


def test_versions_are_those_of_the_constraints() -> None:
    constraints = _constraints()
    required = {name: version for name, (version, _) in _required().items()}
    assert len(required) > 30
    assert required == {name: constraints[name] for name in required}, (
        "run `python deploy/requirements.py`"
    )


@pytest.mark.parametrize("name", ["aiohttp", "grpcio", "msgspec"])
def test_compiled_packages_have_hashes_for_both_architectures_and_pythons(name: str) -> None:
    assert len(set(_required()[name][1])) == 4


def test_every_package_has_a_hash() -> None:
    assert [name for name, (_, hashes) in _required().items() if not hashes] == []


def test_dockerfile_installs_nothing_without_its_hash() -> None:
    text = building.DOCKERFILE.read_text(encoding="utf-8").replace("\\\n", " ")
    installs = [line for line in text.splitlines() if "pip install" in line]
    assert len(installs) == 1
    assert "--require-hashes" in installs[0]
    assert "--no-deps" in installs[0]
