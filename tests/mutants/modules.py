"""The modules that are mutated, in their groups, and the unit tests near each of them."""

import pathlib
import subprocess
from collections.abc import Collection, Iterable, Iterator

import grimp

PRESENTATION = (
    "agent/operate/cli/",
    "agent/operate/doctor/",
    "agent/operate/kubectl/",
    "agent/operate/monitoring/",
    "agent/operate/page/",
    "agent/listing.py",
)
"""What people read; all other modules of the product are logic."""
GOALS = {"logic": 95, "presentation": 90}
"""By group: the percentage of its mutants that tests should kill."""

_PACKAGES = ("agent", "bpf", "probes")
# What no node runs: tools of tests, of `make demo` and of `make docs`.
_LEFT_OUT = (
    "agent/operate/demo/",
    "agent/lab/",
    "agent/operate/cli/log_reference.py",
    "agent/operate/cli/reference.py",
)
# Suites of `make test-kernel` that test the tests, and suites of other targets.
_NO_KERNEL_TESTS = (
    *(
        "bare",
        "bench",
        "cluster",
        "faults",
        "image",
        "mutants",
        "nodes",
        "page",
        "proxy",
        "recipes",
    ),
    "kernel/devices",
)
# Suites that need a kernel with BPF, a container runtime, a cluster or a browser.
_ENVIRONMENTS = ("cluster", "image", "kernel", "node", "page", "proxy", "runtime")


def group(path: str) -> str:
    """Of a module's path, such as "agent/operate/cli/output.py"."""
    return "presentation" if path.startswith(PRESENTATION) else "logic"


def named(root: pathlib.Path, names: Iterable[str]) -> list[str]:
    """The paths of all modules below these files and packages."""
    found = {
        str(module.relative_to(root))
        for name in names
        for module in ([root / name] if name.endswith(".py") else (root / name).rglob("*.py"))
    }
    return sorted(path for path in found if _is_mutated(path))


def every(root: pathlib.Path) -> list[str]:
    return named(root, _PACKAGES)


def changed(root: pathlib.Path) -> list[str]:
    """The modules that differ from the main branch, committed or not."""

    def git(*arguments: str) -> list[str]:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()

    base = git("merge-base", "main", "HEAD")[0]
    new = git("ls-files", "--others", "--exclude-standard")
    paths = {*git("diff", "--name-only", "--diff-filter=d", base), *new}
    return sorted(path for path in paths if _is_mutated(path))


def _is_mutated(path: str) -> bool:
    return (
        path.startswith(tuple(f"{package}/" for package in _PACKAGES))
        and path.endswith(".py")
        and not path.endswith("_pb2.py")
        and not path.startswith(_LEFT_OUT)
    )


def is_near(test: str, module: str) -> bool:
    """Whether a test mirrors a module, or another one of its package."""
    return pathlib.PurePath(test).is_relative_to(pathlib.PurePath("tests", module).parent)


def kernel_tests(root: pathlib.Path) -> list[str]:
    """All files with kernel tests."""
    tests = root / "tests"
    return sorted(
        str(path.relative_to(root))
        for path in tests.rglob("test_*.py")
        if not any(path.is_relative_to(tests / name) for name in _NO_KERNEL_TESTS)
        and "mark.kernel" in path.read_text()
    )


class UnitTests:
    """All unit test files of the tree, and the modules that they import."""

    def __init__(self, root: pathlib.Path) -> None:
        self._graph = grimp.build_graph(*_PACKAGES, "tests", cache_dir=None)
        self._files = {
            name: path
            for name in self._graph.find_matching_modules("tests.**")
            if (path := _unit_test(root, name))
        }

    def reaching(self, modules: Collection[str]) -> list[str]:
        """The files that are near these modules, or import one of them: directly, through modules
        of tests, or through one other module of the product."""
        found = {
            path
            for path in self._files.values()
            if any(is_near(path, module) for module in modules)
        }
        for module in modules:
            name = module.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            if name in self._graph.modules:
                found.update(self._importing(name))
        return sorted(found)

    def _importing(self, module: str) -> Iterator[str]:
        seen, waiting = {module}, [(module, 0)]
        while waiting:
            imported, hops = waiting.pop(0)
            for importer in self._graph.find_modules_that_directly_import(imported) - seen:
                is_test = importer.startswith("tests.")
                if not is_test and hops == 1:
                    continue
                seen.add(importer)
                waiting.append((importer, hops if is_test else hops + 1))
                if importer in self._files:
                    yield self._files[importer]


def _unit_test(root: pathlib.Path, name: str) -> str:
    """The path of a unit test module; empty if it is another module."""
    path = name.replace(".", "/") + ".py"
    parts = pathlib.PurePath(path).parts
    if parts[1] in _ENVIRONMENTS or not parts[-1].startswith("test_"):
        return ""
    # Such a file has nothing else.
    is_kernel = "\npytestmark = pytest.mark.kernel\n" in (root / path).read_text()
    return "" if is_kernel else path
