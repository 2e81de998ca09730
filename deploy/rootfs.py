"""The agent's root file system, copied from the machine that this runs on: as a directory for the
Dockerfile's last stage, or as an OCI archive for `ctr --namespace k8s.io images import`.

    python deploy/rootfs.py /rootfs
    python deploy/rootfs.py --name localhost/podgate:dev --sbom podgate.spdx.json podgate.tar

Run it by the Python of the virtual environment that podgate's dependencies are installed in. What
it copies: Debian's Python with its standard library, nft and what they link to, podgate's
dependencies and podgate itself, with the eBPF programs that bcc compiles for it. There is no shell,
no compiler and no package manager. The same machine gives the same bytes.
"""

import argparse
import compileall
import email
import hashlib
import importlib.metadata
import io
import json
import os
import pathlib
import platform
import py_compile
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import tomllib
from collections.abc import Iterable, Iterator, Mapping

import sbom

SOURCE = pathlib.Path(__file__).resolve().parents[1]
PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"
STANDARD_LIBRARY = pathlib.Path("/usr/lib", PYTHON)
BCC = pathlib.Path("/usr/lib/python3/dist-packages/bcc")
LIBRARIES = pathlib.Path("/usr/lib", sysconfig.get_config_var("MULTIARCH"))
VERSIONED = SOURCE / "agent" / "__init__.py"
# Packages that are not Debian's, in the path of Debian's Python.
PACKAGES = pathlib.Path("/usr/local/lib", PYTHON, "dist-packages")

SBOM = pathlib.Path("/usr/share/sbom/podgate.spdx.json")

# nft is for the default-deny table, test for the readiness probe, bpftool for `podgate programs`.
PROGRAMS = ("nft", "test", "bpftool")
# Opened by name when needed, so no program links to it: by glibc when a thread ends.
OPENED = ("libgcc_s.so.1",)
# Debian's usual links; programs and libraries use both paths.
LINKS = {"bin": "usr/bin", "sbin": "usr/sbin", "lib": "usr/lib", "lib64": "usr/lib64"}
LAUNCHER = f"""#!/usr/bin/{PYTHON}
from agent.operate.cli.main import main

main(prog_name="podgate")
"""

_UNWANTED = re.compile(
    rf"(.*/)?__pycache__/.*|.*\.pyi"
    rf"|{STANDARD_LIBRARY}/(config-|curses|dbm|distutils|ensurepip|idlelib|lib2to3|pydoc_data"
    # These modules alone bring a dozen libraries.
    r"|test|tkinter|lib-dynload/(_curses|_dbm|nis|readline))[^/]*(/.*)?"
    # One module per type and group of the API, 70 MB; the package imports them on use, and podgate
    # uses none.
    r"|kubernetes/(aio/)?client/(models|api)/(?!__init__).*"
    # Languages that rich could highlight, 9 MB.
    r"|pygments/lexers/(?!__init__|_mapping).*"
)
_LAYER = "application/vnd.oci.image.layer.v1.tar"
_CONFIG = "application/vnd.oci.image.config.v1+json"
_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


class Rootfs:
    """A directory that becomes a root file system."""

    def __init__(self, root: pathlib.Path) -> None:
        self.root = root
        self._linked: list[pathlib.Path] = []
        self._origins: set[pathlib.Path] = set()
        self._packages: list[sbom.Package] = []
        for directory in ("usr/bin", "usr/sbin", "usr/lib64", "dev", "etc", "proc", "run", "sys"):
            (root / directory).mkdir(parents=True)
        (root / "tmp").mkdir(mode=0o1777)
        for name, target in LINKS.items():
            (root / name).symlink_to(target)
        self.write(pathlib.Path("/etc/passwd"), "root:x:0:0:root:/:/usr/sbin/nologin\n")
        self.write(pathlib.Path("/etc/group"), "root:x:0:\n")
        self.write(pathlib.Path("/etc/nsswitch.conf"), "hosts: files dns\n")

    def write(self, place: pathlib.Path, text: str, *, executable: bool = False) -> None:
        path = self._path(place)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        path.chmod(0o755 if executable else 0o644)

    def copy(self, origin: pathlib.Path, place: pathlib.Path | None = None) -> None:
        """Copy one file, to the same or another path."""
        path = self._path(place or origin)
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(origin, path)
        path.chmod(0o755 if os.access(origin, os.X_OK) else 0o644)
        if origin.suffix == ".so" or ".so." in origin.name or os.access(origin, os.X_OK):
            self._linked.append(origin)

    def copy_tree(self, origin: pathlib.Path, place: pathlib.Path | None = None) -> None:
        for file in sorted(origin.rglob("*")):
            if file.is_file() and not _UNWANTED.fullmatch(str(file)):
                self.copy(file, (place or origin) / file.relative_to(origin))

    def copy_debian(self, origin: pathlib.Path) -> None:
        """Copy a program or library of the distribution, and record its package."""
        resolved = origin.parent.resolve() / origin.name
        self.copy(resolved)
        self._origins.add(resolved)

    def copy_distribution(self, distribution: importlib.metadata.Distribution) -> None:
        """Copy a Python package as pip installed it, without its commands."""
        for file in sorted(distribution.files or ()):
            origin = pathlib.Path(str(distribution.locate_file(file)))
            is_inside = not file.is_absolute() and ".." not in file.parts
            if is_inside and origin.is_file() and not _UNWANTED.fullmatch(str(file)):
                self.copy(origin, PACKAGES / file)
        self._packages.append(sbom.of_python(distribution))

    def copy_compiler(self) -> None:
        """Copy bcc, which opens its library by name."""
        self.copy_tree(BCC)
        self.copy_debian(LIBRARIES / "libbcc.so.0")

    def compile_programs(self) -> None:
        """Compile the eBPF programs, without the right to create maps."""
        with tempfile.TemporaryDirectory() as directory:
            no_maps = pathlib.Path(directory, "no_maps.so")
            gcc = ["gcc", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-o", str(no_maps)]
            subprocess.run([*gcc, str(SOURCE / "deploy" / "no_maps.c")], check=True)
            subprocess.run(
                [sys.executable, "-m", "bpf.compiler", "--all", directory],
                cwd=SOURCE,
                env={**os.environ, "LD_PRELOAD": str(no_maps)},
                check=True,
            )
            for file in sorted(pathlib.Path(directory).glob("*.json")):
                self.copy(file, PACKAGES / "bpf" / "compiled" / file.name)

    def copy_linked(self) -> None:
        """Copy the libraries of all files so far."""
        done: set[pathlib.Path] = set()
        for library in _linked_libraries(self._linked):
            place = library.parent.resolve() / library.name
            if place not in done:
                done.add(place)
                self.copy_debian(place)

    def write_packages(self) -> None:
        """Write packages and licences, where scanners of images without dpkg read them."""
        paths = [*self._origins, STANDARD_LIBRARY / "os.py"]
        if self._path(BCC).exists():
            paths.append(BCC / "__init__.py")
        # Debian's database may list a file by a former link to its directory.
        paths += [pathlib.Path(*path.parts[:1], *path.parts[2:]) for path in paths]
        answer = subprocess.run(
            ["dpkg-query", "--search", *map(str, paths)],
            check=False,
            capture_output=True,
            text=True,
        )
        packages = {
            line.partition(":")[0]
            for line in answer.stdout.splitlines()
            if not line.startswith("diversion by ")
        }
        for package in sorted(packages):
            status = subprocess.run(
                ["dpkg-query", "--status", package], check=True, capture_output=True, text=True
            )
            self.write(pathlib.Path("/var/lib/dpkg/status.d", package), status.stdout)
            release = f"debian-{_debian()}"
            described = sbom.of_debian(email.message_from_string(status.stdout), release)
            self._packages.append(described)
            licence = pathlib.Path("/usr/share/doc", package, "copyright")
            if licence.exists():
                self.copy(licence)

    def write_sbom(self, project: Mapping[str, str]) -> None:
        """Write the list of all packages."""
        name, version = project["name"], _version()
        product = sbom.Package(name, version, f"pkg:oci/{name}@{version}", project["license"])
        self.write(SBOM, sbom.document(product, self._packages))

    def compile(self) -> None:
        """Compile all Python files: the root file system is read-only at run time. Invalidation is
        by unchecked hashes, since times are not preserved."""
        directories = (STANDARD_LIBRARY, BCC, PACKAGES)
        for directory in filter(lambda place: self._path(place).exists(), directories):
            compileall.compile_dir(
                self._path(directory),
                stripdir=str(self.root),
                prependdir="/",
                quiet=2,
                workers=0,
                invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
            )

    def _path(self, place: pathlib.Path) -> pathlib.Path:
        return self.root / place.relative_to("/")


def build(
    root: pathlib.Path, more_programs: Iterable[str] = (), *, has_compiler: bool = False
) -> None:
    """Copy everything to an empty directory."""
    made = Rootfs(root)
    project = tomllib.loads((SOURCE / "pyproject.toml").read_text(encoding="utf-8"))
    made.copy_debian(pathlib.Path("/usr/bin", PYTHON))
    (root / "usr/bin/python3").symlink_to(PYTHON)
    made.copy_tree(STANDARD_LIBRARY)
    if has_compiler:
        made.copy_compiler()
    for name in OPENED:
        made.copy_debian(LIBRARIES / name)
    for name in (*PROGRAMS, *more_programs):
        made.copy_debian(pathlib.Path(_program(name)))
    extra = project["project"]["optional-dependencies"]["otlp"]
    for distribution in _dependencies([*project["project"]["dependencies"], *extra]):
        made.copy_distribution(distribution)
    for package in project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]:
        made.copy_tree(SOURCE / package, PACKAGES / package)
    made.compile_programs()
    made.write(pathlib.Path("/usr/local/bin/podgate"), LAUNCHER, executable=True)
    made.copy(pathlib.Path(sys.prefix, "bin/podgate-cni"), pathlib.Path("/usr/bin/podgate-cni"))
    made.copy_linked()
    made.write_packages()
    made.write_sbom(project["project"])
    made.compile()


def pack(root: pathlib.Path, archive: pathlib.Path, name: str, labels: Mapping[str, str]) -> None:
    """Write the directory as an OCI archive of one image with one layer. labels: further ones."""
    project = tomllib.loads((SOURCE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    with tempfile.TemporaryFile(dir=archive.parent) as layer:
        with tarfile.open(fileobj=layer, mode="w", format=tarfile.GNU_FORMAT) as members:
            for path in sorted(root.rglob("*")):
                members.add(path, str(path.relative_to(root)), recursive=False, filter=_plain)
        size = layer.tell()
        layer.seek(0)
        digest = f"sha256:{hashlib.file_digest(layer, 'sha256').hexdigest()}"
        layer.seek(0)
        config = _json(
            {
                "architecture": _ARCHITECTURES.get(os.uname().machine, os.uname().machine),
                "os": "linux",
                "config": {
                    "Entrypoint": ["/usr/local/bin/podgate"],
                    "Env": ["PATH=/usr/local/bin:/usr/sbin:/usr/bin"],
                    "Labels": {
                        "org.opencontainers.image.title": project["name"],
                        "org.opencontainers.image.description": project["description"],
                        "org.opencontainers.image.version": _version(),
                        "org.opencontainers.image.licenses": project["license"],
                        **labels,
                    },
                },
                "rootfs": {"type": "layers", "diff_ids": [digest]},
            }
        )
        manifest = _json(
            {
                "schemaVersion": 2,
                "mediaType": _MANIFEST,
                "config": _descriptor(_CONFIG, config),
                "layers": [{"mediaType": _LAYER, "digest": digest, "size": size}],
            }
        )
        described = _descriptor(_MANIFEST, manifest)
        described["annotations"] = {"io.containerd.image.name": name}
        index = _json({"schemaVersion": 2, "manifests": [described]})
        with tarfile.open(archive, "w") as members:
            _add(members, "oci-layout", b'{"imageLayoutVersion": "1.0.0"}')
            _add(members, "index.json", index)
            for blob in (config, manifest):
                _add(members, _blob(_digest(blob)), blob)
            entry = tarfile.TarInfo(_blob(digest))
            entry.size = size
            members.addfile(entry, layer)


def _version() -> str:
    """podgate's, which is in one place."""
    found = re.search(r'^VERSION = "(.+)"$', VERSIONED.read_text(encoding="utf-8"), re.MULTILINE)
    assert found is not None
    return found[1]


def _debian() -> str:
    """The version of the distribution, such as 13."""
    return platform.freedesktop_os_release().get("VERSION_ID", "")


def _program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise SystemExit(f"rootfs: {name} is missing; run deploy/setup.sh, which installs it")
    return found


def _dependencies(requirements: Iterable[str]) -> Iterator[importlib.metadata.Distribution]:
    """Requirements and their requirements, without extras."""
    found: dict[str, importlib.metadata.Distribution] = {}
    todo = list(requirements)
    while todo:
        requirement, _, marker = todo.pop().partition(";")
        name = re.split(r"[^\w.-]", requirement, maxsplit=1)[0]
        key = re.sub(r"[-_.]+", "-", name).lower()
        if key in found or "extra" in marker:
            continue
        try:
            found[key] = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            if marker:
                continue  # for another system or another Python
            raise SystemExit(f"rootfs: {name} is missing; run deploy/setup.sh") from None
        todo += found[key].requires or ()
    return iter(found[key] for key in sorted(found))


def _linked_libraries(files: Iterable[pathlib.Path]) -> list[pathlib.Path]:
    """Libraries of the distribution, as the dynamic linker lists them."""
    elves = [str(file) for file in files if _is_elf(file)]
    answer = subprocess.run(["ldd", *elves], check=False, capture_output=True, text=True)
    if missing := sorted(set(re.findall(r"(\S+) => not found", answer.stdout))):
        raise SystemExit(f"rootfs: libraries are missing: {', '.join(missing)}")
    found = re.findall(r"\s(/\S+) \(0x", answer.stdout)
    return sorted({pathlib.Path(path) for path in found if path.startswith(("/usr/", "/lib"))})


def _is_elf(file: pathlib.Path) -> bool:
    with file.open("rb") as opened:
        return opened.read(4) == b"\x7fELF"


def _plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = entry.mtime = 0
    entry.uname = entry.gname = "root"
    return entry


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    archive.addfile(entry, io.BytesIO(content))


def _json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True).encode()


def _digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def _blob(digest: str) -> str:
    return f"blobs/{digest.replace(':', '/')}"


def _descriptor(kind: str, content: bytes) -> dict[str, object]:
    return {"mediaType": kind, "digest": _digest(content), "size": len(content)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("output", type=pathlib.Path, help="directory to create, or FILE.tar")
    parser.add_argument("--name", default="localhost/podgate:dev", help="image name in FILE.tar")
    parser.add_argument("--program", action="append", default=[], help="additional program to copy")
    parser.add_argument("--compiler", action="store_true", help="copy bcc as well, for tests")
    parser.add_argument("--source", help="where the source is, a label of the image in FILE.tar")
    parser.add_argument("--revision", help="commit of the source, a label of the image in FILE.tar")
    parser.add_argument("--sbom", type=pathlib.Path, help="copy the SBOM of FILE.tar to this file")
    options = parser.parse_args()
    named = {"source": options.source, "revision": options.revision}
    labels = {f"org.opencontainers.image.{key}": value for key, value in named.items() if value}
    if options.output.suffix != ".tar":
        options.output.mkdir()
        build(options.output, options.program, has_compiler=options.compiler)
        return
    with tempfile.TemporaryDirectory(prefix="podgate-rootfs-") as directory:
        root = pathlib.Path(directory, "root")
        root.mkdir()
        build(root, options.program, has_compiler=options.compiler)
        pack(root, options.output, options.name, labels)
        if options.sbom:
            shutil.copyfile(root / SBOM.relative_to("/"), options.sbom)


if __name__ == "__main__":
    main()
