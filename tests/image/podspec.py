"""The kubelet's conversion of a pod's spec for the container runtime (pkg/kubelet/kuberuntime).

Only fields that podgate's manifests use; any other one is an error, so that a manifest is never
tested as another one.
"""

import pathlib
import re
from collections.abc import Mapping
from typing import Any

from agent.cri import runtime_pb2
from tests.runtime import driving_pb2

Json = dict[str, Any]

TOKEN = "/var/run/secrets/kubernetes.io/serviceaccount"

# Of no meaning for the runtime: the scheduler, the API server or the probing kubelet reads them.
_ELSEWHERE = {
    *(
        "serviceAccountName",
        "automountServiceAccountToken",
        "priorityClassName",
        "dnsPolicy",
        "affinity",
    ),
    *("enableServiceLinks", "terminationGracePeriodSeconds", "nodeSelector", "tolerations"),
    *("nodeName", "restartPolicy", "activeDeadlineSeconds"),
}
_PROBES = {"startupProbe", "readinessProbe", "livenessProbe"}
_PROPAGATION = {
    "None": driving_pb2.PROPAGATION_PRIVATE,
    "HostToContainer": driving_pb2.PROPAGATION_HOST_TO_CONTAINER,
    "Bidirectional": driving_pb2.PROPAGATION_BIDIRECTIONAL,
}
_SECCOMP = {
    "Unconfined": driving_pb2.SecurityProfile.Unconfined,
    "RuntimeDefault": driving_pb2.SecurityProfile.RuntimeDefault,
}
# Of containers that are not privileged (pkg/securitycontext/util.go).
_MASKED = (
    *("/proc/asound", "/proc/acpi", "/proc/kcore", "/proc/keys", "/proc/latency_stats"),
    *("/proc/timer_list", "/proc/timer_stats", "/proc/sched_debug", "/proc/scsi"),
    *("/sys/firmware", "/sys/devices/virtual/powercap"),
)
_READ_ONLY = ("/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger")
_MEBI = 1 << 20


def sandbox(pod: Json, *, cgroup_parent: str, logs: pathlib.Path) -> Any:
    """The PodSandboxConfig of a pod with a name, a namespace and a uid."""
    metadata, spec = pod["metadata"], pod["spec"]
    known = {"hostNetwork", "hostPID", "containers", "volumes", *_ELSEWHERE}
    assert spec.keys() <= known, spec.keys() - known
    return driving_pb2.PodSandboxConfig(
        metadata=runtime_pb2.PodSandboxMetadata(
            name=metadata["name"], namespace=metadata["namespace"], uid=metadata["uid"]
        ),
        hostname="" if spec.get("hostNetwork") else metadata["name"],
        log_directory=str(logs),
        linux=driving_pb2.LinuxPodSandboxConfig(
            cgroup_parent=cgroup_parent,
            security_context=driving_pb2.LinuxSandboxSecurityContext(
                namespace_options=_namespaces(spec),
                privileged=any(_security(one).get("privileged") for one in spec["containers"]),
                seccomp=driving_pb2.SecurityProfile(
                    profile_type=driving_pb2.SecurityProfile.Unconfined
                ),
            ),
        ),
    )


def container(
    pod: Json,
    attempt: int,
    *,
    fields: Mapping[str, str],
    service: Mapping[str, str],
    volumes: Mapping[str, pathlib.Path],
    token: pathlib.Path,
) -> Any:
    """The ContainerConfig of a pod's only container.

    fields: of the downward API; service: where the API server is; volumes: where those are that the
    kubelet makes; token: of the service account.
    """
    (spec,) = pod["spec"]["containers"]
    known = {"name", "image", "imagePullPolicy", "command", "args", "env", "resources"}
    known |= {"securityContext", "volumeMounts", *_PROBES}
    assert spec.keys() <= known, spec.keys() - known
    paths = {one["name"]: _host_path(one, volumes) for one in pod["spec"]["volumes"]}
    mounts = [_mount(one, paths[one["name"]]) for one in spec["volumeMounts"]]
    mounts.append(driving_pb2.Mount(container_path=TOKEN, host_path=str(token), readonly=True))
    security = _security(spec)
    is_privileged = security.get("privileged", False)
    variables = {**service, **dict(_env(one, fields) for one in spec["env"])}
    return driving_pb2.ContainerConfig(
        metadata=runtime_pb2.ContainerMetadata(name=spec["name"], attempt=attempt),
        image=driving_pb2.ImageSpec(image=spec["image"]),
        command=spec.get("command", ()),
        args=[_expanded(one, variables) for one in spec.get("args", ())],
        envs=[driving_pb2.KeyValue(key=key, value=value) for key, value in variables.items()],
        mounts=mounts,
        log_path=f"{spec['name']}-{attempt}.log",
        linux=driving_pb2.LinuxContainerConfig(
            resources=driving_pb2.LinuxContainerResources(
                cpu_shares=_cpu_shares(spec),
                memory_limit_in_bytes=memory_limit(spec),
            ),
            security_context=driving_pb2.LinuxContainerSecurityContext(
                capabilities=driving_pb2.Capability(
                    add_capabilities=security.get("capabilities", {}).get("add", ()),
                    drop_capabilities=security.get("capabilities", {}).get("drop", ()),
                ),
                privileged=is_privileged,
                masked_paths=() if is_privileged else _MASKED,
                readonly_paths=() if is_privileged else _READ_ONLY,
                namespace_options=_namespaces(pod["spec"]),
                readonly_rootfs=security.get("readOnlyRootFilesystem", False),
                no_new_privs=not security.get("allowPrivilegeEscalation", True),
                seccomp=driving_pb2.SecurityProfile(
                    profile_type=_SECCOMP[security["seccompProfile"]["type"]]
                ),
            ),
        ),
    )


def memory_limit(container: Json) -> int:
    """Bytes."""
    text: str = container["resources"]["limits"]["memory"]
    assert text.endswith("Mi"), text
    return int(text.removesuffix("Mi")) * _MEBI


def _cpu_shares(container: Json) -> int:
    """Of 1024 for a CPU (pkg/kubelet/cm/helpers_linux.go)."""
    text: str = container["resources"]["requests"]["cpu"]
    assert text.endswith("m"), text
    return int(text.removesuffix("m")) * 1024 // 1000


def make_host_paths(pod: Json) -> None:
    """As the kubelet before it starts containers (pkg/volume/hostpath)."""
    for volume in pod["spec"]["volumes"]:
        if host := volume.get("hostPath"):
            path = pathlib.Path(host["path"])
            if host["type"] == "DirectoryOrCreate":
                path.mkdir(parents=True, exist_ok=True)
            assert path.is_dir(), f"hostPath type check failed: {path} is not a directory"


def _security(container: Json) -> Json:
    security: Json = container["securityContext"]
    known = {"privileged", "readOnlyRootFilesystem", "seccompProfile", "capabilities"}
    # No profile of AppArmor is loaded on the tests' node.
    known |= {"allowPrivilegeEscalation", "appArmorProfile"}
    assert security.keys() <= known, security.keys() - known
    return security


def _namespaces(spec: Json) -> Any:
    return runtime_pb2.NamespaceOption(
        network=runtime_pb2.NODE if spec.get("hostNetwork") else runtime_pb2.POD,
        pid=runtime_pb2.NODE if spec.get("hostPID") else runtime_pb2.CONTAINER,
    )


def _host_path(volume: Json, made: Mapping[str, pathlib.Path]) -> str:
    if "hostPath" in volume:
        path: str = volume["hostPath"]["path"]
        return path
    assert "emptyDir" in volume, volume
    return str(made[volume["name"]])


def _mount(mount: Json, host_path: str) -> Any:
    known = {"name", "mountPath", "readOnly", "mountPropagation"}
    assert mount.keys() <= known, mount.keys() - known
    return driving_pb2.Mount(
        container_path=mount["mountPath"],
        host_path=host_path,
        readonly=mount.get("readOnly", False),
        propagation=_PROPAGATION[mount.get("mountPropagation", "None")],
    )


def _expanded(argument: str, variables: Mapping[str, str]) -> str:
    """With the values of $(NAME) (third_party/forked/golang/expansion)."""
    return re.sub(r"\$\((\w+)\)", lambda match: variables.get(match[1], match[0]), argument)


def _env(variable: Json, fields: Mapping[str, str]) -> tuple[str, str]:
    if "value" in variable:
        return variable["name"], variable["value"]
    return variable["name"], fields[variable["valueFrom"]["fieldRef"]["fieldPath"]]
