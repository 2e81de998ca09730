"""CRI-O with runc, conmon and CNI plugins, like the containerd of `tests.runtime.containerd`.

Debian has no package of it: its programs `crio` and `pinns` are in a directory that the user names.
conmon and skopeo, which brings images in, are Debian's.
"""

import contextlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any, ClassVar

from tests import polling
from tests.runtime import containerd, images
from tests.runtime.containerd import Containerd

# CRI-O sets the limit of each controller that the kernel has, and runc fails where its hierarchy is
# not mounted: some machines have no hugetlb among those of version 1. And without CAP_SYS_RESOURCE
# no process may be made less likely to be killed, or have it; containerd has a setting for that.
_RUNC = """\
#!{python}
import json, os, sys

def change(path, process_of):
    with open(path) as file:
        config = json.load(file)
    process = process_of(config)
    if not {has_hugetlb}:
        config.get("linux", {{}}).get("resources", {{}}).pop("hugepageLimits", None)
    if not {has_resource}:
        process.pop("oomScoreAdj", None)
        for names in process.get("capabilities", {{}}).values():
            names[:] = [name for name in names if name != "CAP_SYS_RESOURCE"]
    with open(path, "w") as file:
        json.dump(config, file)

arguments = sys.argv[1:]
if "create" in arguments:
    bundle = arguments[arguments.index("--bundle") + 1]
    change(bundle + "/config.json", lambda config: config["process"])
elif "exec" in arguments:
    option = "--process" if "--process" in arguments else "-p"
    change(arguments[arguments.index(option) + 1], lambda config: config)
os.execv({runc!r}, [{runc!r}, *sys.argv[1:]])
"""
_CAP_SYS_RESOURCE = 24
_UUID = "-".join("?" * length for length in (8, 4, 4, 4, 12))
_REGISTRIES = "/etc/containers/registries.conf"


class Crio(Containerd):
    """One runtime. `start` it; `end` takes it and its containers away."""

    sockets: ClassVar = pathlib.Path("/run/crio")
    namespaces: ClassVar = tuple(f"{kind}/{_UUID}" for kind in ("netns", "ipcns", "utsns"))

    def __init__(
        self, network: dict[str, Any], binaries: pathlib.Path, *, has_nri: bool = False
    ) -> None:
        """binaries: the directory with `crio` and `pinns`."""
        self._binaries = binaries
        self._has_nri = has_nri
        super().__init__(network)
        self.socket = self.directory / "socket" / "crio.sock"
        policy = {"default": [{"type": "insecureAcceptAnything"}]}
        (self.directory / "policy.json").write_text(json.dumps(policy))
        runtime = self.directory / "runc-of-crio"
        status = pathlib.Path("/proc/self/status").read_text()
        capabilities = int(status.partition("CapBnd:")[2].split()[0], 16)
        runtime.write_text(
            _RUNC.format(
                python=sys.executable,
                has_hugetlb=not pathlib.Path("/sys/fs/cgroup/unified").is_dir(),
                has_resource=bool(capabilities >> _CAP_SYS_RESOURCE & 1),
                runc=containerd.binary("runc"),
            )
        )
        runtime.chmod(0o755)

    def boot(self) -> None:
        """Start without namespaces and the version file, which are in memory: it then forgets its
        sandboxes, which have no process (docs/crio.conf.5.md, `version_file`, `drop_infra_ctr`)."""
        self.stop()
        containerd.unmount(lambda: [one for one in containerd.mounts() if self._is_namespace(one)])
        self._remove_namespaces()
        (self.directory / "version").unlink()
        self.start()

    def import_images(self) -> None:
        """Bring in the images of `tests.runtime.images`."""
        archive = self.directory / "images.tar"
        images.write(archive, os.uname().machine)
        for name in (images.PAUSE, images.POD):
            self._copy(archive, name)

    def import_archive(self, archive: pathlib.Path) -> None:
        """Bring in the image of an OCI archive."""
        listed = ["tar", "--extract", "--to-stdout", "--file", str(archive), "index.json"]
        index = json.loads(subprocess.run(listed, check=True, capture_output=True).stdout)
        for manifest in index["manifests"]:
            self._copy(archive, manifest["annotations"]["io.containerd.image.name"])

    def _copy(self, archive: pathlib.Path, name: str) -> None:
        # An image's name in an OCI layout is another annotation than containerd's.
        directory = self.directory / "layout"
        directory.mkdir(exist_ok=True)
        subprocess.run(["tar", "-xf", str(archive), "-C", str(directory)], check=True)
        index = json.loads((directory / "index.json").read_text())
        for manifest in index["manifests"]:
            annotations = manifest["annotations"]
            annotations["org.opencontainers.image.ref.name"] = annotations[
                "io.containerd.image.name"
            ]
        (directory / "index.json").write_text(json.dumps(index))
        store = f"[overlay@{self.directory}/root+{self.directory}/runroot]"
        policy = f"--policy={self.directory}/policy.json"
        subprocess.run(
            [
                "skopeo",
                policy,
                "copy",
                f"oci:{directory}:{name}",
                f"containers-storage:{store}{name}",
            ],
            check=True,
            capture_output=True,
            timeout=polling.PATIENCE_SECONDS,
        )

    def _command(self) -> list[str]:
        return [
            str(self._binaries / "crio"),
            f"--config={self.directory}/config.toml",
            "--config-dir=",
        ]

    def _config(self) -> str:
        own = self.directory
        return f"""
[crio]
root = "{own}/root"
runroot = "{own}/runroot"
storage_driver = "overlay"
log_dir = "{own}/logs"
version_file = "{own}/version"
version_file_persist = "{own}/version-persist"
clean_shutdown_file = "{own}/clean"

[crio.api]
listen = "{own}/socket/crio.sock"

[crio.runtime]
default_runtime = "runc"
cgroup_manager = "cgroupfs"
conmon_cgroup = "pod"
apparmor_profile = "unconfined"
seccomp_profile = ""
pinns_path = "{self._binaries}/pinns"
namespaces_dir = "/run"
container_exits_dir = "{own}/exits"
container_attach_socket_dir = "{own}/attach"
ctr_stop_timeout = 5
pids_limit = -1

[crio.runtime.runtimes.runc]
runtime_path = "{own}/runc-of-crio"
runtime_root = "{own}/runc"
monitor_path = "{containerd.binary("conmon")}"

[crio.image]
pause_image = "{images.PAUSE}"
pause_command = "/bin/sleep 2147483647"
signature_policy = "{own}/policy.json"
signature_policy_dir = "{own}/policies"

[crio.network]
network_dir = "{self.cni_directory}"
plugin_dirs = ["{self.plugins}"]

[crio.nri]
enable_nri = {str(self._has_nri).lower()}
nri_listen = "/run/nri/nri.sock"
nri_plugin_dir = "{own}/nri-plugins"
nri_plugin_config_dir = "{own}/nri-config"

[crio.nri.default_validator]
# For pods that require a plugin by an annotation.
nri_enable_default_validator = true
"""


@contextlib.contextmanager
def running(
    network: dict[str, Any], binaries: pathlib.Path, *, has_nri: bool = False
) -> Iterator[Crio]:
    """A runtime with images, in the lab that this process is in; gone afterwards."""
    with containerd.covered(), _short_names():
        made = Crio(network, binaries, has_nri=has_nri)
        try:
            made.import_images()
            made.start()
            yield made
        finally:
            made.end()


@contextlib.contextmanager
def _short_names() -> Iterator[None]:
    """Names without a registry, as in the manifests, mean docker.io. CRI-O reads no other file."""
    with tempfile.NamedTemporaryFile("w", suffix=".conf") as file:
        file.write('unqualified-search-registries = ["docker.io"]\nshort-name-mode = "disabled"\n')
        file.flush()
        subprocess.run(["mount", "--bind", file.name, _REGISTRIES], check=True)
        try:
            yield
        finally:
            subprocess.run(["umount", _REGISTRIES], check=True)
