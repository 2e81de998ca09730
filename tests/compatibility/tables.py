"""The tables of docs/compatibility.md: what users want to know, and where its runs are recorded.

Cells of a row without a record are "not tried", so a row can be written before its first run.
"""

import dataclasses
from collections.abc import Iterator, Sequence

from tests.compatibility import runs
from tests.compatibility.cells import NOT_TRIED, tried, unsupported
from tests.compatibility.runs import MODES
from tests.kernels import record as kernels
from tests.kernels import report as kernel_report
from tests.meshes import record as meshes
from tests.networks import records
from tests.networks.records import Row

_NETWORKS: dict[str, tuple[str, ...]] = {
    "CNI plugin ptp (routed)": ("ptp", "ptp-containerd2", "ptp-crio"),
    "CNI plugin bridge, static routes between nodes": ("routes-rules",),
    "Calico, iptables": ("calico-iptables",),
    "Calico, nftables": ("calico-nftables",),
    "Calico, eBPF": ("calico-ebpf",),
    "flannel, VXLAN": ("flannel-vxlan-iptables", "flannel-vxlan-nftables"),
    "flannel, host-gw": ("flannel-host-gw-iptables", "flannel-host-gw-nftables"),
    "Cilium": (),
    "Antrea, OVN-Kubernetes": (),
    "AWS VPC CNI, network policy agent": ("aws",),
    "Azure CNI": (),
    "kindnet": (),
    "kube-router, without its service proxy": ("kube-router",),
}
_NO_PAIR = unsupported("the pod's interface is no veth pair; doctor reports NotSupported")
_WITHOUT_GATES = ("macvlan, ipvlan, SR-IOV", "netkit")
_PROXIES: dict[str, tuple[str, ...]] = {
    "kube-proxy, iptables": (
        "flannel-vxlan-iptables",
        "flannel-host-gw-iptables",
        "routes-iptables",
    ),
    "kube-proxy, nftables": (
        "flannel-vxlan-nftables",
        "flannel-host-gw-nftables",
        "routes-nftables",
    ),
    "kube-proxy, ipvs": (),
    "Calico's eBPF": ("calico-ebpf",),
    "Cilium's": (),
}
_RUNTIMES = (
    *("containerd 1.6", "containerd 1.7", "containerd 2"),
    *("CRI-O 1.36", "CRI-O 1.37", "Docker with cri-dockerd", "Kata Containers", "gVisor"),
)
_HOSTS = ("Debian 11", "Debian 12", "Debian 13", "Ubuntu", "Fedora", "Flatcar", "Bottlerocket")
_ARCHITECTURES = ("amd64", "arm64")
_GUESTS_KERNEL = "6.12"
"""Of guests of other architectures."""
_KUBELETS = {f"1.{minor}": f"v1.{minor}" for minor in (37, 36, 35, 34, 33, 32, 31, 30)}
_DISTRIBUTIONS = ("k3s, RKE2", "MicroK8s", "k0s", "OpenShift, MicroShift", "EKS, GKE, AKS")
_KERNELS = ("6.18", "6.12", "6.6", "6.1", "5.15", "5.10")
_MESHES = {
    "Istio sidecar, REDIRECT": "istio-redirect",
    "Istio sidecar, TPROXY": "istio-tproxy",
    "Istio sidecar, nftables": "istio-nftables",
    "Istio ambient, iptables": "ambient-iptables",
    "Istio ambient, nftables": "ambient-nftables",
    "Linkerd": "linkerd",
    "Consul": "consul",
    "Kuma": "kuma",
}
_PROBES = {"http": "http", "https": "https", "grpc": "grpc", "tcp": "tcp up"}


@dataclasses.dataclass(frozen=True, slots=True)
class Table:
    """title: of its section; note: below it; each row is a name and its cells."""

    title: str
    note: str
    columns: Sequence[str]
    rows: Sequence[tuple[str, Sequence[str]]]


def all_tables() -> list[Table]:
    return [
        _networks(),
        _proxies(),
        _meshes(),
        _by_attribute("Container runtime and mode", "runtime", _RUNTIMES),
        _by_attribute("Host and mode", "host", _HOSTS),
        _kernels(),
        _architectures(),
        _kubelets(),
    ]


def _networks() -> Table:
    rows = [(name, _of_records(recorded, _of_network)) for name, recorded in _NETWORKS.items()]
    rows += [(name, [_NO_PAIR] * len(MODES)) for name in _WITHOUT_GATES]
    note = (
        "flannel and static routes run on several nodes. AWS' programs run without EC2: a stand-in "
        "for ipamd gives addresses to pods. [Runs](internals/networks.md) has every test. "
        "Those of no mode that failed in the newest run: "
        f"{'; '.join(_failed_of_no_mode()) or 'none'}."
    )
    return Table("Network and mode", note, MODES, rows)


def _failed_of_no_mode() -> Iterator[str]:
    """By record: restarts, roll-outs, removal, soaks."""
    for path in sorted(records.RECORDED.glob("*.json")):
        failed = [
            row.subject
            for row in runs.of_records(path.stem)
            if row.mode not in MODES and row.result != "passed"
        ]
        if failed:
            yield f"{path.stem}: {', '.join(failed)}"


def _proxies() -> Table:
    rows = [
        (name, _of_records(recorded, _of_kubernetes if "kube-proxy" in name else _of_network))
        for name, recorded in _PROXIES.items()
    ]
    note = (
        "Without a row: [podgate's proxies](proxy.md), which `make test-proxy` compares with "
        "kube-proxy's rules."
    )
    return Table("Service proxy and mode", note, MODES, rows)


def _of_kubernetes(row: Row) -> str:
    return row.kubernetes


def _of_network(row: Row) -> str:
    return row.version


def _of_records(names: tuple[str, ...], version: runs.Version) -> list[str]:
    return runs.by_mode(runs.of_records(*names) if names else [], version)


def _by_attribute(title: str, attribute: str, values: Sequence[str]) -> Table:
    """Rows by an attribute of the recorded rows, whose value has the version."""
    rows = []
    for value in values:
        found = runs.of_attribute(attribute, value)
        rows.append((value, runs.by_mode(found, lambda row: str(getattr(row, attribute)))))
    return Table(title, "", MODES, rows)


def _architectures() -> Table:
    """By clusters, else by the demo in a guest, which has all modes."""
    table = _by_attribute("Architecture and mode", "architecture", _ARCHITECTURES)
    rows, runs_of_guests = [], []
    for name, cells in table.rows:
        title = kernel_report.title(_GUESTS_KERNEL, name)
        found = kernels.read(title)
        demo = found.files.get("tests/kernel/test_demo.py")
        if set(cells) == {NOT_TRIED} and demo is not None and not demo.failed:
            cells = [tried(found.date, f"{name}, Linux {found.package}")] * len(MODES)
            failed = sum(len(one.failed) for one in found.files.values())
            tests = sum(one.tests for one in found.files.values())
            runs_of_guests.append(
                f"{name} was emulated: `make demo`, and {tests} kernel tests, {failed} failed"
            )
        rows.append((name, cells))
    note = f"{'; '.join(runs_of_guests)} ([kernel runs](internals/kernel-runs.md))."
    return dataclasses.replace(table, rows=rows, note=note if runs_of_guests else "")


def _kubelets() -> Table:
    rows = [
        (
            name,
            runs.by_mode(runs.of_attribute("kubernetes", prefix), _of_kubernetes),
        )
        for name, prefix in _KUBELETS.items()
    ]
    rows += [(name, [NOT_TRIED] * len(MODES)) for name in _DISTRIBUTIONS]
    note = (
        "Guards need 1.30, MutatingAdmissionPolicies 1.36; older API servers get the webhook. "
        "Where kubelet and API server are one process, it is found by its name and by the "
        "kubelet's port (unit tests)."
    )
    return Table("Kubelet and mode", note, MODES, rows)


def _kernels() -> Table:
    """Kernel tests by their own record; clusters by the kernel that they ran on."""
    rows, failures = [], []
    for kernel in _KERNELS:
        found = kernels.read(kernel)
        clusters = runs.of_attribute("kernel", kernel)
        tests = tried(found.date, found.package) if found.files else NOT_TRIED
        in_modes = (row for row in clusters if row.mode in MODES)
        rows.append((kernel, [tests, runs.cell(in_modes, lambda row: row.kernel)]))
        if failed := sum(len(one.failed) for one in found.files.values()):
            count = sum(one.tests for one in found.files.values())
            failures.append(f"{failed} of {count} on {kernel}")
    too_old = unsupported("gates need 5.10")
    rows.append(("older than 5.10", [too_old, too_old]))
    note = (
        "Kernel tests run in QEMU with software emulation, with cgroup v2 alone. Failed tests: "
        f"{', '.join(failures) or 'none'}. "
        "On 6.18, where podgate is developed, `make test` runs them all, without a record. "
        "[Kernel runs](internals/kernel-runs.md) names them; [kernels](kernels.md) lists what each "
        "kernel lacks."
    )
    return Table("Kernel", note, ("kernel tests", "clusters"), rows)


def _meshes() -> Table:
    """Probes in strict: in other modes podgate changes none of them."""
    recorded = meshes.read()
    rows = []
    for name, mesh in _MESHES.items():
        run = recorded.get(mesh, {}).get(meshes.PROBES)
        rows.append((name, [_probe(run, kind) for kind in _PROBES.values()]))
    note = (
        "Probes in strict, as the pod's author wrote them; [mesh runs](internals/mesh-runs.md) "
        "has each kind in each mode."
    )
    return Table("Service mesh and kind of probe", note, tuple(_PROBES), rows)


def _probe(run: meshes.Run | None, kind: str) -> str:
    if run is None or kind not in run.results.get("strict", {}):
        return NOT_TRIED
    result = run.results["strict"][kind]
    if result != meshes.RIGHT:
        without = run.results.get("none", {}).get(kind, "unknown")
        return unsupported(f"its result is {result}; without podgate {without}")
    versions = ", ".join(f"{name} {version}" for name, version in sorted(run.programs.items()))
    return tried(run.date, versions)
