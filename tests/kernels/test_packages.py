"""What a guest gets beyond the machine's files."""

import io
import pathlib
import tarfile

from tests.kernels import packages

SIMULATED = """\
NOTE: This is only a simulation!
Inst libxdp1 (1.3.1-1 Debian:12.15/oldstable [amd64])
Inst openvswitch-switch (3.1.0-2+deb12u1 Debian:12.15/oldstable, Debian-Security:12 [amd64])
Conf libxdp1 (1.3.1-1 Debian:12.15/oldstable [amd64])
"""


def test_packages_that_apt_would_install_are_named() -> None:
    assert packages.to_install(SIMULATED) == ["libxdp1", "openvswitch-switch"]
    assert packages.to_install("0 upgraded, 0 newly installed\n") == []


def test_installed_package_needs_no_files(tmp_path: pathlib.Path) -> None:
    content = packages.archive(["bash"], tmp_path)
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        assert {name for name in tar.getnames() if name != "."} == set()
