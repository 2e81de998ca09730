"""The chart: its values, what it renders, and what is made of it."""

import json
import re
from typing import Any

import click
import pytest
import yaml

from agent import VERSION, labels
from agent.controller import certificates, injection, review, webhook_certificate
from agent.controller.settings import WEBHOOK_PORT
from agent.operate.cli import main as cli
from bpf.verdicts import Mode
from tests.chart import examples, kubernetes, outputs, rendering, schemas
from tests.chart.rendering import CHART, Json
from tests.chart.schemas import Schemas

_SCHEMA = schemas.read(CHART / "values.schema.json")


def _options(command: str, arguments: list[str]) -> dict[str, Any]:
    """The parsed command line of a container. Raises `click.UsageError`."""
    # A command keeps the help option of its first context, so that has the settings of podgate.
    root = click.Context(cli.main, **cli.main.context_settings)
    found = cli.main.get_command(root, command)
    assert found is not None
    return dict(found.make_context(command, arguments, parent=root).params)


def _problems(overrides: Json) -> list[str]:
    return list(Schemas({}).problems(rendering.with_values(overrides), _SCHEMA))


def _found(things: list[Json], kind: str, name: str = "podgate") -> Json:
    (found,) = (one for one in things if one["kind"] == kind and one["metadata"]["name"] == name)
    return found


def _agent(overrides: Json, **release: str) -> Json:
    """The spec of the agents' pods."""
    daemon_set = _found(rendering.objects(overrides, **release), "DaemonSet")
    spec: Json = daemon_set["spec"]["template"]["spec"]
    return spec


def _container(overrides: Json) -> Json:
    (container,) = _agent(overrides)["containers"]
    made: Json = container
    return made


def _arguments(overrides: Json) -> dict[str, Any]:
    """As podgate itself parses them."""
    command, *arguments = _container(overrides)["args"]
    assert command == "run"
    return _options("run", arguments)


def test_what_is_made_of_the_chart_is_current() -> None:
    made = outputs.files()
    written = {path: path.read_text(encoding="utf-8") for path in made}
    others = {path: text for path, text in made.items() if text != written[path]}
    assert {path: written[path] for path in others} == others, "run `make docs`"
    manifests = {
        path for path in outputs.MANIFESTS.rglob("*.yaml") if path.name != "kustomization.yaml"
    }
    assert manifests == {path for path in made if outputs.MANIFESTS in path.parents}


@pytest.mark.parametrize("name", examples.VALUES)
def test_every_object_fits_the_schemas_of_the_kubernetes_api(name: str) -> None:
    things = rendering.objects(examples.VALUES[name])
    assert "DaemonSet" in {thing["kind"] for thing in things}
    assert [problem for thing in things for problem in kubernetes.problems(thing)] == []


def _variables(overrides: Json) -> dict[tuple[str, str], dict[str, str]]:
    """By kind and name of the object: the variables of its containers that have a value."""
    return {
        (thing["kind"], thing["metadata"]["name"]): {
            variable["name"]: variable["value"]
            for container in thing["spec"]["template"]["spec"]["containers"]
            for variable in container.get("env", [])
            if "value" in variable
        }
        for thing in rendering.objects(overrides)
        if "template" in thing.get("spec", {})
    }


def test_all_that_use_the_api_server_get_its_address() -> None:
    """`podgate proxy` has its services from the agent."""
    everything = {"hub": {"enabled": True}, "proxy": {"enabled": True}}
    address = {"KUBERNETES_SERVICE_HOST": "fd00:18::1", "KUBERNETES_SERVICE_PORT": "6443"}
    found = _variables({**everything, "apiServer": {"host": "fd00:18::1"}})
    with_address = {
        name for name, variables in found.items() if address.items() <= variables.items()
    }
    assert with_address == found.keys() - {("DaemonSet", "podgate-proxy")}
    assert len(with_address) == 4
    for variables in _variables(everything).values():
        assert not address.keys() & variables.keys()


def test_each_workload_takes_variables_volumes_and_a_log_level() -> None:
    things = rendering.objects(examples.VALUES["extras"])
    workloads = {
        thing["metadata"]["name"]: thing["spec"]["template"]["spec"]
        for thing in things
        if thing["kind"] in ("DaemonSet", "Deployment")
    }
    assert workloads.keys() == {
        *("podgate", "podgate-controller", "podgate-proxy", "podgate-hub"),
    }
    for spec in workloads.values():
        (container,) = spec["containers"]
        assert "--log-level=warning" in container["args"]
        assert {"name": "SSL_CERT_FILE", "value": "/etc/authorities/ca.crt"} in container["env"]
        (mount,) = (one for one in container["volumeMounts"] if one["name"] == "authorities")
        assert mount["mountPath"] == "/etc/authorities"
        assert {"name": "authorities", "configMap": {"name": "authorities"}} in spec["volumes"]
    strategy = _found(things, "DaemonSet")["spec"]["updateStrategy"]
    assert strategy == {"type": "OnDelete"}


def test_common_labels_are_on_every_object_but_definitions() -> None:
    things = rendering.objects(examples.VALUES["extras"])
    kinds: dict[str, set[str]] = {"with": set(), "without": set()}
    for thing in things:
        is_labelled = thing["metadata"].get("labels", {}).get("example.org/owner") == "platform"
        kinds["with" if is_labelled else "without"].add(thing["kind"])
    assert kinds["without"] == {"CustomResourceDefinition"}
    assert {"DaemonSet", "Deployment", "ClusterRole", "ServiceAccount"} <= kinds["with"]


def test_an_unknown_field_and_a_wrong_type_are_found() -> None:
    thing = _found(rendering.objects(), "DaemonSet")
    thing["spec"]["minReadySeconds"] = "30"
    thing["spec"]["template"]["spec"]["dnsPolcy"] = "Default"
    first, second = kubernetes.problems(thing)
    assert first == "DaemonSet podgate.spec.minReadySeconds: '30' is no integer"
    assert second == "DaemonSet podgate.spec.template.spec.dnsPolcy: is not known"


@pytest.mark.parametrize("name", examples.VALUES)
def test_values_of_the_examples_fit_their_schema(name: str) -> None:
    assert _problems(examples.VALUES[name]) == []


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        ({"mode": "enfroce"}, ".mode: 'enfroce' is none of ['off', 'audit', 'enforce', 'strict']"),
        ({"imge": {}}, ".imge: is not known"),
        ({"image": {"digest": "sha256:12"}}, ".image.digest: 'sha256:12' does not match"),
        ({"agent": {"maxSurge": 0}}, ".agent.maxSurge: 0 is less than 1"),
        ({"controller": {"replicas": "2"}}, ".controller.replicas: '2' is no integer"),
        ({"runtime": {"directories": []}}, ".runtime.directories: has too few items"),
        ({"enforceOnly": "yes"}, ".enforceOnly: 'yes' is no boolean"),
    ],
)
def test_a_wrong_value_is_rejected(overrides: Json, problem: str) -> None:
    (found,) = _problems(overrides)
    assert found.startswith(problem)


def test_the_schema_has_every_value_and_no_other() -> None:
    def names(schema: Json, path: str = "") -> set[str]:
        inner = schema.get("properties", {})
        found = {name for key, one in inner.items() for name in names(one, f"{path}.{key}")}
        return found if inner else {path[1:]}

    # Helm adds `global` for charts of which this one is a part.
    assert names(_SCHEMA) == {name for name, _, _ in outputs.values()} | {"global"}


def test_every_value_is_described() -> None:
    assert [name for name, _, description in outputs.values() if not description] == []


def test_modes_are_those_of_podgate() -> None:
    assert _SCHEMA["properties"]["mode"]["enum"] == [mode.label for mode in Mode]


def test_version_is_podgate_s() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    assert (chart["version"], chart["appVersion"]) == (VERSION, VERSION)


def test_default_drops_nothing_and_rolls_out_node_by_node() -> None:
    parsed = _arguments({})
    assert parsed["mode"] == "audit"
    assert parsed["max_mode"] == "strict"
    spec = _found(rendering.objects(), "DaemonSet")["spec"]
    assert spec["updateStrategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}


def test_digest_and_registry_of_an_air_gapped_site_are_in_all_images() -> None:
    things = rendering.objects(examples.VALUES["air-gapped"])
    for kind, name in (("DaemonSet", "podgate"), ("Deployment", "podgate-controller")):
        spec = _found(things, kind, name)["spec"]["template"]["spec"]
        (container,) = spec["containers"]
        assert re.fullmatch(
            rf"registry\.example:5000/mirror/podgate:{VERSION}@sha256:[0-9a-f]{{64}}",
            container["image"],
        )
        assert spec["imagePullSecrets"] == [{"name": "mirror"}]


def test_no_image_is_one_of_a_public_registry_unless_named() -> None:
    assert _container({})["image"] == f"localhost/podgate:{VERSION}"


def test_enforce_only_is_not_privileged_and_has_the_documented_capabilities() -> None:
    security = _container(examples.VALUES["enforce-only"])["securityContext"]
    assert not security.get("privileged")
    assert security["allowPrivilegeEscalation"] is False
    assert security["capabilities"] == {
        "drop": ["ALL"],
        "add": ["NET_ADMIN", "NET_BROADCAST", "NET_RAW", "SYS_ADMIN", "SYS_PTRACE"],
    }
    assert security["seccompProfile"] == {"type": "RuntimeDefault"}
    assert _arguments(examples.VALUES["enforce-only"])["max_mode"] == "enforce"


def test_overlay_is_the_chart_s_enforce_only() -> None:
    path = outputs.OVERLAYS / "enforce-only" / "kustomization.yaml"
    overlay = yaml.safe_load(path.read_text(encoding="utf-8"))
    ((_, patch),) = (one.items() for one in overlay["patches"])
    base = _found(rendering.objects({"namespace": {"create": True}}), "DaemonSet")
    (container,) = base["spec"]["template"]["spec"]["containers"]
    for change in yaml.safe_load(patch[1]):
        place, _, name = change["path"].rpartition("/")
        assert (change["op"], place) == ("replace", "/spec/template/spec/containers/0")
        container[name] = change["value"]
    assert base == _found(rendering.objects({"enforceOnly": True}), "DaemonSet")


def test_all_usual_runtimes_are_mounted_without_a_type_that_would_hold_the_pod() -> None:
    spec = _agent({})
    volumes = {one["name"]: one["hostPath"] for one in spec["volumes"] if "hostPath" in one}
    mounts = {one["mountPath"]: volumes.get(one["name"]) for one in _mounts(spec)}
    for path in ("/run/containerd", "/run/crio", "/run/k3s/containerd", "/run/k0s"):
        assert mounts[path] == {"path": path, "type": "DirectoryOrCreate"}


def _mounts(spec: Json) -> list[Json]:
    (container,) = spec["containers"]
    found: list[Json] = container["volumeMounts"]
    return found


def test_a_named_socket_replaces_them() -> None:
    overrides = {"runtime": {"socket": "/run/cri-dockerd.sock"}}
    spec = _agent(overrides)
    (volume,) = (one for one in spec["volumes"] if one["name"].startswith("runtime"))
    (mount,) = (one for one in _mounts(spec) if one["name"] == volume["name"])
    assert volume["hostPath"]["path"] == "/run"
    socket = _arguments(overrides)["cri_socket"]
    assert str(socket) == f"{mount['mountPath']}/cri-dockerd.sock"


@pytest.mark.parametrize("name", examples.VALUES)
def test_every_volume_is_mounted_once_and_every_mount_has_one(name: str) -> None:
    spec = _agent(examples.VALUES[name])
    mounted = [one["name"] for one in _mounts(spec)]
    assert sorted(mounted) == sorted(one["name"] for one in spec["volumes"])
    assert len({one["mountPath"] for one in _mounts(spec)}) == len(mounted)


def test_cni_directories_are_mounted_where_the_agent_writes() -> None:
    parsed = _arguments(examples.VALUES["everything"])
    writable = {one["mountPath"] for one in _mounts(_agent(examples.VALUES["everything"]))}
    assert {str(parsed["cni_conf_dir"]), str(parsed["cni_bin_dir"])} <= writable
    assert parsed["cni_strict_start"]


def test_agents_and_hubs_of_services_use_the_same_port_and_certificates() -> None:
    values = examples.VALUES["services"]
    chosen = service_options_of(_container(values)["args"], "run")
    assert chosen["services_from"] == ("198.18.0.1:9653", "198.18.0.2:9653")
    mounts = {one["mountPath"] for one in _mounts(_agent(values))}
    assert {str(chosen["services_tls_ca"].parent), str(chosen["services_state"].parent)} <= mounts
    deployment = _found(rendering.objects(values), "Deployment", "podgate-hub")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    hub = service_options_of(container["args"], "hub")
    assert hub["services_listen"] == ("", 9653)
    assert str(hub["services_tls_ca"].parent) in {one["mountPath"] for one in _mounts_of(container)}
    assert {"services": 9653, "http": hub["http_address"][1]} == {
        one["name"]: one["containerPort"] for one in container["ports"]
    }


def service_options_of(arguments: list[str], name: str) -> dict[str, Any]:
    """As podgate itself parses them."""
    command, *options = arguments
    assert command == name
    return _options(name, options)


def _mounts_of(container: Json) -> list[Json]:
    found: list[Json] = container["volumeMounts"]
    return found


def test_hubs_may_read_what_they_request() -> None:
    things = rendering.objects(examples.VALUES["services"])
    rules = _found(things, "ClusterRole", "podgate-hub")["rules"]
    allowed = {
        (group, resource)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }
    assert allowed == {
        ("", "nodes"),
        ("", "services"),
        ("discovery.k8s.io", "endpointslices"),
    }


def test_agents_run_where_the_image_and_a_kernel_are() -> None:
    spec = _agent({})
    assert spec["nodeSelector"] == {"kubernetes.io/os": "linux"}
    affinity = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    (term,) = affinity["nodeSelectorTerms"]
    needed = {one["key"]: (one["operator"], one["values"]) for one in term["matchExpressions"]}
    assert needed["kubernetes.io/arch"] == ("In", ["amd64", "arm64"])
    assert needed["type"] == ("NotIn", ["virtual-kubelet"])


def test_agents_resolve_names_as_their_node() -> None:
    assert _agent({})["dnsPolicy"] == "Default"


def test_guards_name_the_agents_of_the_release_s_namespace() -> None:
    policies = [
        one
        for one in rendering.objects({}, namespace="elsewhere")
        if one["kind"] == "ValidatingAdmissionPolicy" and "agent" in one["metadata"]["name"]
    ]
    user = "request.userInfo.username == 'system:serviceaccount:elsewhere:podgate'"
    assert len(policies) == 3
    for policy in policies:
        assert [one["expression"] for one in policy["spec"]["matchConditions"]] == [user]


def test_nothing_is_in_another_namespace_than_the_release() -> None:
    things = rendering.objects(examples.VALUES["everything"], namespace="elsewhere")
    named = {
        one["metadata"]["namespace"]
        for one in things
        if "namespace" in one["metadata"]
        and one["metadata"]["name"] != "podgate-probe-certificates"
    }
    subjects = {one["namespace"] for thing in things for one in thing.get("subjects", ())}
    assert named == subjects == {"elsewhere"}


@pytest.mark.parametrize("service", ["Helm", "kubectl"])
def test_every_object_has_a_label_by_which_it_is_found(service: str) -> None:
    things = rendering.objects(examples.VALUES["everything"], service=service)
    assert len(things) > 10
    for thing in things:
        labels = thing["metadata"]["labels"]
        assert labels["app.kubernetes.io/name"].startswith("podgate")
        if thing["kind"] != "CustomResourceDefinition":
            assert labels["app.kubernetes.io/managed-by"] == service
            assert ("helm.sh/chart" in labels) == (service == "Helm")


def test_selectors_have_no_label_that_a_version_changes() -> None:
    workloads = [one for one in rendering.objects() if one["kind"] in ("DaemonSet", "Deployment")]
    names = {one["metadata"]["name"] for one in workloads}
    assert names == {"podgate", "podgate-controller"}
    for one in workloads:
        assert one["spec"]["selector"]["matchLabels"].keys() == {"app.kubernetes.io/name"}
        assert one["spec"]["template"]["metadata"]["labels"].keys() == {
            "app.kubernetes.io/name",
            "app.kubernetes.io/component",
            "app.kubernetes.io/part-of",
        }


def test_quota_admits_the_pods_of_both_priority_classes() -> None:
    things = rendering.objects()
    (expression,) = _found(things, "ResourceQuota")["spec"]["scopeSelector"]["matchExpressions"]
    used = {
        one["spec"]["template"]["spec"]["priorityClassName"]
        for one in things
        if one["kind"] in ("DaemonSet", "Deployment")
    }
    assert set(expression["values"]) == used


def test_policies_outlive_the_release() -> None:
    policies = {
        one["metadata"]["name"]: one["metadata"]["annotations"]["helm.sh/resource-policy"]
        for one in rendering.objects()
        if one["kind"] == "CustomResourceDefinition"
    }
    names = (
        "conditionowners.podgate.io",
        "hostaccesspolicies.policy.podgate.io",
        "hostegresspolicies.policy.podgate.io",
        "nodereports.podgate.io",
    )
    assert policies == dict.fromkeys(names, "keep")


def test_controller_can_be_left_out_with_all_that_is_its() -> None:
    things = rendering.objects({"controller": {"enabled": False}})
    assert not [one for one in things if "controller" in one["metadata"]["name"]]


def test_service_proxy_and_what_it_needs_of_the_agent_are_off_by_default() -> None:
    assert not [one for one in rendering.objects() if "proxy" in one["metadata"]["name"]]
    assert not _arguments({})["service_endpoints"]


def test_service_proxy_has_the_options_of_the_values() -> None:
    values = examples.VALUES["everything"]
    spec = _found(rendering.objects(values), "DaemonSet", "podgate-proxy")["spec"]["template"][
        "spec"
    ]
    (container,) = spec["containers"]
    command, *arguments = container["args"]
    parsed = _options(command, arguments)
    wanted = {
        "backend": "ebpf",
        "pod_networks": ("198.18.0.0/16", "fd00:18::/32"),
        "node_addresses": ("198.19.0.0/16",),
        "service_proxy_name": "podgate",
        "metrics_address": ("127.0.0.1", 10349),
        "healthz_address": ("::", 10356),
        "log_format": "text",
    }
    assert {name: parsed[name] for name in wanted} == wanted
    (ready,) = (
        one for one in _mounts(spec) if parsed["started_file"].is_relative_to(one["mountPath"])
    )
    assert container["readinessProbe"]["exec"]["command"][-1] == str(parsed["started_file"])
    assert ready["name"] == "tmp"
    assert _arguments(values)["service_endpoints"]


def test_service_proxy_s_capabilities_are_those_that_podgate_checks() -> None:
    things = rendering.objects({"proxy": {"enabled": True}})
    spec = _found(things, "DaemonSet", "podgate-proxy")["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    agent = _container(examples.VALUES["enforce-only"])["securityContext"]["capabilities"]
    assert container["securityContext"]["capabilities"] == agent
    mounted = sorted(one["name"] for one in _mounts(spec))
    assert mounted == sorted(one["name"] for one in spec["volumes"])


def test_webhooks_call_paths_that_the_controller_serves_at_its_service() -> None:
    things = rendering.objects()
    service = _found(things, "Service", certificates.SERVICE_NAME)
    assert [one["port"] for one in service["spec"]["ports"]] == [WEBHOOK_PORT]
    found = {
        f"{one['kind'].lower()}s/{one['metadata']['name']}": one["webhooks"]
        for one in things
        if one["kind"].endswith("WebhookConfiguration")
    }
    names = {key: tuple(one["name"] for one in webhooks) for key, webhooks in found.items()}
    assert names == webhook_certificate.CONFIGURATIONS
    called = [one["clientConfig"]["service"] for webhooks in found.values() for one in webhooks]
    assert {one["path"] for one in called} == {
        review.PROBE_SPEC_PATH,
        *review.INJECT_PATHS.values(),
    }
    for one in called:
        assert (one["name"], one["namespace"]) == (service["metadata"]["name"], "podgate")
        assert one["port"] == WEBHOOK_PORT
    # A webhook that fails costs a gate, and not the pod.
    policies = {one["failurePolicy"] for webhooks in found.values() for one in webhooks}
    assert policies == {"Ignore"}


def test_webhooks_s_job_names_the_configurations_that_are_installed() -> None:
    for mechanism in ("webhook", "policies", "none"):
        things = rendering.objects({"injection": {"mechanism": mechanism}})
        job = _found(things, "Job", webhook_certificate.NAME)
        (container,) = job["spec"]["template"]["spec"]["containers"]
        command, *arguments = container["args"]
        installed = {
            f"{one['kind'].lower()}s/{one['metadata']['name']}"
            for one in things
            if one["kind"].endswith("WebhookConfiguration")
        }
        assert set(_options(command, arguments)["configurations"]) == installed
        assert len(installed) == 1 + (mechanism == "webhook")


def test_job_s_rights_are_named_and_its_bindings_are_those_that_it_deletes() -> None:
    things = rendering.objects()
    for kind in ("Role", "ClusterRole"):
        for rule in _found(things, kind, webhook_certificate.NAME)["rules"]:
            assert rule["resourceNames"]
    bound = {
        f"/apis/{one['apiVersion']}/"
        + (f"namespaces/{namespace}/" if (namespace := one["metadata"].get("namespace")) else "")
        + f"{one['kind'].lower()}s/{one['metadata']['name']}"
        for one in things
        if one["kind"].endswith("Binding")
        and webhook_certificate.NAME in [subject["name"] for subject in one.get("subjects", ())]
    }
    assert bound == set(webhook_certificate.own_bindings("podgate"))


def test_helm_removes_the_job_and_its_rights_after_each_installation_and_upgrade() -> None:
    hooks = [
        one for one in rendering.objects() if one["metadata"]["name"] == webhook_certificate.NAME
    ]
    assert len(hooks) == 6
    for one in hooks:
        annotations = one["metadata"]["annotations"]
        assert annotations["helm.sh/hook"] == "post-install,post-upgrade"
        assert "hook-succeeded" in annotations["helm.sh/hook-delete-policy"]
        # Its rights first.
        assert (int(annotations["helm.sh/hook-weight"]) < 0) == (one["kind"] != "Job")
    plain = rendering.objects(service="kubectl")
    assert [one for one in plain if "annotations" in one["metadata"] and one in hooks] == []


_ADMISSION = "admissionregistration.k8s.io"


def test_controller_has_no_right_to_admission_objects_secrets_or_roles() -> None:
    for values in examples.VALUES.values():
        things = rendering.objects(values)
        roles = {
            (one["roleRef"]["kind"], one["roleRef"]["name"])
            for one in things
            if one["kind"].endswith("RoleBinding")
            and "podgate-controller" in [subject["name"] for subject in one["subjects"]]
        }
        rules = [
            rule
            for one in things
            if (one["kind"], one["metadata"]["name"]) in roles
            for rule in one["rules"]
        ]
        assert bool(rules) == values.get("controller", {}).get("enabled", True)
        groups = {group for rule in rules for group in rule["apiGroups"]}
        assert groups <= {"", "coordination.k8s.io", "podgate.io", "policy.podgate.io"}
        written = {
            (resource, verb)
            for rule in rules
            for resource in rule["resources"]
            for verb in rule["verbs"]
            if verb not in ("get", "list", "watch")
        }
        assert written <= {
            ("hostaccesspolicies/status", "patch"),
            ("hostegresspolicies/status", "patch"),
            ("leases", "create"),
            ("leases", "update"),
        }
        assert "secrets" not in {name for rule in rules for name in rule["resources"]}


_OF_OWNERS = "podgate-inject-owners"
_POLICY = f"{_ADMISSION}/v1/MutatingAdmissionPolicy"


@pytest.mark.parametrize(
    ("mechanism", "served", "kinds"),
    [
        ("auto", (), {"MutatingWebhookConfiguration"}),
        ("auto", (_POLICY,), {"MutatingAdmissionPolicy", "MutatingAdmissionPolicyBinding"}),
        ("policies", (), {"MutatingAdmissionPolicy", "MutatingAdmissionPolicyBinding"}),
        ("webhook", (_POLICY,), {"MutatingWebhookConfiguration"}),
        ("none", (_POLICY,), set()),
    ],
)
def test_gates_are_injected_in_one_way(
    mechanism: str, served: tuple[str, ...], kinds: set[str]
) -> None:
    things = rendering.objects({"injection": {"mechanism": mechanism}}, served=served)
    assert {one["kind"] for one in things if one["kind"].startswith("Mutating")} == kinds


def test_policies_inject_without_a_controller_and_webhooks_do_not_exist_then() -> None:
    things = rendering.objects({"controller": {"enabled": False}}, served=(_POLICY,))
    assert [one for one in things if "WebhookConfiguration" in one["kind"]] == []
    assert len([one for one in things if one["kind"] == "MutatingAdmissionPolicy"]) == 3
    assert [
        one for one in rendering.objects({"controller": {"enabled": False}}) if "Mut" in one["kind"]
    ] == []


def test_gates_of_owners_are_injected_by_a_policy_for_listed_domains() -> None:
    """A pod is created, whatever fails, and one without any ConditionOwner, too."""
    domains = {"domains": ["gpu.example.com", "disk.example.com"]}
    things = rendering.objects({"conditions": domains, "injection": {"mechanism": "policies"}})
    policy = _found(things, "MutatingAdmissionPolicy", _OF_OWNERS)["spec"]
    own = _found(things, "MutatingAdmissionPolicy", "podgate-inject-isolation")["spec"]
    assert policy["failurePolicy"] == own["failurePolicy"] == "Ignore"
    first, *others = policy["matchConditions"]
    assert first["expression"].endswith("in ['gpu.example.com', 'disk.example.com']")
    # Which pods get gates at all is one list.
    assert others == own["matchConditions"][:-1]
    binding = _found(things, "MutatingAdmissionPolicyBinding", _OF_OWNERS)["spec"]
    assert binding == {
        "policyName": _OF_OWNERS,
        "paramRef": {"selector": {}, "parameterNotFoundAction": "Allow"},
    }
    for values in (
        {"injection": {"mechanism": "policies"}},
        {"injection": {"mechanism": "webhook"}, "conditions": domains},
    ):
        names = {one["metadata"]["name"] for one in rendering.objects(values)}
        assert _OF_OWNERS not in names


def test_policies_and_webhooks_select_the_same_pods() -> None:
    things = rendering.objects({"injection": {"mechanism": "policies"}})
    policies = [one["spec"] for one in things if one["kind"] == "MutatingAdmissionPolicy"]
    (configuration,) = (
        one for one in rendering.objects() if one["kind"] == "MutatingWebhookConfiguration"
    )
    webhooks = configuration["webhooks"]
    assert len(webhooks) == len(policies) == len(injection.VALUES)
    for policy, webhook in zip(policies, webhooks, strict=True):
        assert policy["matchConditions"] == webhook["matchConditions"]
        constraints = policy["matchConstraints"]
        assert constraints["namespaceSelector"] == webhook["namespaceSelector"]
        (rule,) = webhook["rules"]
        assert [{**constraints["resourceRules"][0], "scope": "Namespaced"}] == [rule]
        (values,) = (
            one["values"]
            for one in webhook["namespaceSelector"]["matchExpressions"]
            if one["key"] == labels.INJECT_LABEL
        )
        (gate,) = (gate for gate, found in injection.VALUES.items() if found == tuple(values))
        (mutation,) = policy["mutations"]
        assert f'conditionType: "{gate}"' in mutation["jsonPatch"]["expression"]
        assert webhook["clientConfig"]["service"]["path"] == review.INJECT_PATHS[gate]


def test_names_are_not_those_that_controllers_of_previous_versions_wrote() -> None:
    """Helm takes over no object that it has not created, and the Job deletes the earlier ones."""
    things = rendering.objects({"injection": {"mechanism": "policies"}}) + rendering.objects()
    names = {
        f"{one['kind'].lower().removesuffix('y')}/{one['metadata']['name']}"
        for one in things
        if one["apiVersion"].startswith(_ADMISSION)
    }
    obsolete = {path.partition("/")[2] for path in webhook_certificate.OBSOLETE}
    assert names
    assert {name.partition("/")[2] for name in names}.isdisjoint(obsolete)


def test_certificate_of_the_controller_is_mounted_and_may_come_later() -> None:
    for certificate in ("job", "cert-manager", "secret"):
        values = {"controller": {"webhook": {"certificate": certificate}}}
        deployment = _found(rendering.objects(values), "Deployment", "podgate-controller")
        spec = deployment["spec"]["template"]["spec"]
        (container,) = spec["containers"]
        (mount,) = container["volumeMounts"]
        (volume,) = spec["volumes"]
        parsed = _options("controller", container["args"][1:])
        assert str(parsed["webhook_tls"]) == mount["mountPath"]
        assert volume["secret"]["secretName"] == certificates.SECRET_NAME
        assert volume["secret"]["optional"]


def test_without_a_certificate_there_are_no_webhooks() -> None:
    things = rendering.objects({"controller": {"webhook": {"certificate": "none"}}})
    assert [one for one in things if "Webhook" in one["kind"] or one["kind"] == "Job"] == []
    deployment = _found(things, "Deployment", "podgate-controller")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert _options("controller", container["args"][1:])["webhook_tls"] is None


def test_cert_manager_makes_the_certificate_of_the_service_and_writes_the_bundle() -> None:
    things = rendering.objects({"controller": {"webhook": {"certificate": "cert-manager"}}})
    certificate = _found(things, "Certificate", "podgate-controller")
    assert certificate["spec"]["dnsNames"] == certificates.service_names("podgate")
    assert certificate["spec"]["secretName"] == certificates.SECRET_NAME
    for one in things:
        if one["kind"].endswith("WebhookConfiguration"):
            annotations = one["metadata"]["annotations"]
            assert annotations["cert-manager.io/inject-ca-from"] == "podgate/podgate-controller"
    assert "Job" not in {one["kind"] for one in things}


def test_own_bundle_is_in_every_webhook() -> None:
    values = {"controller": {"webhook": {"certificate": "secret", "caBundle": "QQ=="}}}
    bundles = {
        webhook["clientConfig"]["caBundle"]
        for one in rendering.objects(values)
        if one["kind"].endswith("WebhookConfiguration")
        for webhook in one["webhooks"]
    }
    assert bundles == {"QQ=="}


def test_clients_certificates_and_names_are_those_of_the_values() -> None:
    webhook = {"clientAuthority": "apiservers", "clientNames": ["kube-apiserver"]}
    things = rendering.objects({"controller": {"webhook": webhook}})
    spec = _found(things, "Deployment", "podgate-controller")["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    parsed = _options("controller", container["args"][1:])
    assert parsed["webhook_client_name"] == ("kube-apiserver",)
    mounts = {one["mountPath"]: one["name"] for one in container["volumeMounts"]}
    volume = mounts[str(parsed["webhook_client_ca"].parent)]
    (found,) = (one for one in spec["volumes"] if one["name"] == volume)
    assert found["configMap"]["name"] == "apiservers"


def test_controller_prefers_the_control_plane_and_tolerates_its_taint() -> None:
    things = rendering.objects()
    for kind, name in (("Deployment", "podgate-controller"), ("Job", webhook_certificate.NAME)):
        spec = _found(things, kind, name)["spec"]["template"]["spec"]
        affinity = spec["affinity"]["nodeAffinity"]
        (preferred,) = affinity["preferredDuringSchedulingIgnoredDuringExecution"]
        (expression,) = preferred["preference"]["matchExpressions"]
        label = "node-role.kubernetes.io/control-plane"
        assert expression == {"key": label, "operator": "Exists"}
        assert {"key": label, "operator": "Exists", "effect": "NoSchedule"} in spec["tolerations"]


def test_network_policy_admits_only_the_named_peers_to_the_webhook() -> None:
    peers = [{"ipBlock": {"cidr": "192.0.2.10/32"}}]
    things = rendering.objects({"controller": {"networkPolicy": {"from": peers}}})
    policy = _found(things, "NetworkPolicy", "podgate-controller")
    pods = _found(things, "Deployment", "podgate-controller")["spec"]["template"]["metadata"]
    assert policy["spec"]["podSelector"]["matchLabels"].items() <= pods["labels"].items()
    admitted = {
        port["port"]: rule.get("from")
        for rule in policy["spec"]["ingress"]
        for port in rule["ports"]
    }
    assert admitted == {"webhook": peers, "http": None}
    assert [one for one in rendering.objects() if one["kind"] == "NetworkPolicy"] == []


def test_notes_have_the_way_to_enforce_and_the_way_out() -> None:
    notes = rendering.texts(namespace="elsewhere")[rendering.NOTES]
    assert "Nothing is dropped." in notes
    assert "kubectl podgate suggest" in notes
    assert "kubectl podgate enforce NAMESPACE" in notes
    assert "--podgate-namespace=elsewhere" in notes
    assert "kubectl podgate uninstall" in notes
    assert "Nothing is dropped." not in rendering.texts({"mode": "enforce"})[rendering.NOTES]


def test_alerts_link_to_runbooks_that_are_served_elsewhere() -> None:
    served = "https://wiki.example.org/podgate/runbooks"
    values = {"monitoring": {"prometheusRule": {"enabled": True, "runbookUrl": served}}}
    rule = _found(rendering.objects(values), "PrometheusRule")
    alerts = [one for group in rule["spec"]["groups"] for one in group["rules"] if "alert" in one]
    assert {one["annotations"]["runbook_url"] for one in alerts} == {
        f"{served}/{one['alert']}.md" for one in alerts
    }
    assert not [one for one in alerts if "runbook" in one["annotations"]]


def test_dashboard_links_to_runbooks_that_are_served_elsewhere() -> None:
    served = "https://wiki.example.org/podgate/runbooks"
    monitoring = {
        "prometheusRule": {"enabled": True, "runbookUrl": served},
        "dashboards": {"enabled": True},
    }
    for values, address in (({"monitoring": monitoring}, served), (None, "docs/runbooks")):
        things = rendering.objects(values or {"monitoring": {"dashboards": {"enabled": True}}})
        shown = _found(things, "ConfigMap", "podgate-on-call")["data"]["podgate-on-call.json"]
        variables = json.loads(shown)["templating"]["list"]
        (runbooks,) = (one for one in variables if one["name"] == "runbooks")
        assert runbooks["query"] == runbooks["current"]["value"] == address


def test_dashboards_and_rules_are_those_of_deploy_monitoring() -> None:
    things = rendering.objects(examples.VALUES["monitoring"])
    rule = _found(things, "PrometheusRule")
    plain = [
        group
        for name in ("recordings.yaml", "alerts.yaml")
        for group in yaml.safe_load((outputs.MONITORING / name).read_text("utf-8"))["groups"]
    ]
    assert rule["spec"] == {"groups": plain}
    shown = {
        name: content
        for thing in things
        if thing["kind"] == "ConfigMap"
        for name, content in thing["data"].items()
    }
    files = sorted((outputs.MONITORING / "dashboards").iterdir())
    assert len(files) >= 2
    assert shown.keys() == {path.name for path in files}
    for path in files:
        assert json.loads(shown[path.name]) == json.loads(path.read_text(encoding="utf-8"))


def test_prometheus_finds_the_agents_at_the_port_that_they_serve() -> None:
    overrides = examples.VALUES["monitoring"]
    (endpoint,) = _found(rendering.objects(overrides), "PodMonitor")["spec"]["podMetricsEndpoints"]
    rewritten = [one for one in endpoint["relabelings"] if one.get("targetLabel") == "__address__"]
    addresses = {"10.0.0.1": "10.0.0.1:19652", "fd00::1": "[fd00::1]:19652"}
    for address, expected in addresses.items():
        (replacement,) = (
            match.expand(one["replacement"].replace("$1", r"\1"))
            for one in rewritten
            if (match := re.fullmatch(one["regex"], address))
        )
        assert replacement == expected
    argument = "--metrics-address=$(HOST_IP):19652"
    assert argument in _container(overrides)["args"]
    assert endpoint["honorLabels"]


def test_series_without_a_pod_get_no_labels_of_the_agent_s_pod() -> None:
    """The operator gives targets these labels, and then the relabelings of a PodMonitor take place.
    With --metrics=node alerts named the agent's pod as the one that is open."""
    (endpoint,) = _found(rendering.objects(examples.VALUES["monitoring"]), "PodMonitor")["spec"][
        "podMetricsEndpoints"
    ]
    dropped = [one["regex"] for one in endpoint["relabelings"] if one.get("action") == "labeldrop"]
    of_target = (
        "namespace",
        "pod",
        "container",
        "job",
        "endpoint",
        "node",
        "instance",
        "__address__",
    )
    kept = [name for name in of_target if not any(re.fullmatch(one, name) for one in dropped)]
    assert kept == ["job", "endpoint", "node", "instance", "__address__"]


def test_operator_s_prometheus_scrapes_with_a_token_that_may_read_metrics() -> None:
    things = rendering.objects(examples.VALUES["monitoring"])
    (endpoint,) = _found(things, "PodMonitor")["spec"]["podMetricsEndpoints"]
    credentials = endpoint["authorization"]["credentials"]
    secret = _found(things, "Secret", credentials["name"])
    # The API server's token controller writes it.
    assert (secret["type"], credentials["key"]) == ("kubernetes.io/service-account-token", "token")
    account = secret["metadata"]["annotations"]["kubernetes.io/service-account.name"]
    assert _found(things, "ServiceAccount", account)
    binding = _found(things, "ClusterRoleBinding", "podgate-metrics-reader-podmonitor")
    assert binding["roleRef"]["name"] == "podgate-metrics-reader"
    assert [one["name"] for one in binding["subjects"]] == [account]


def test_operator_s_prometheus_sends_its_token_to_the_holders_of_the_certificate_alone() -> None:
    """Another process of the node may take the port."""
    values = examples.VALUES["monitoring"]
    secret = values["metrics"]["tlsSecret"]
    (endpoint,) = _found(rendering.objects(values), "PodMonitor")["spec"]["podMetricsEndpoints"]
    assert endpoint["tlsConfig"] == {
        "ca": {"secret": {"name": secret, "key": "ca.crt"}},
        "serverName": "podgate.podgate.svc",
    }
    spec = _agent(values)
    (mount,) = (one for one in _mounts(spec) if one["name"] == "metrics-tls")
    (volume,) = (one for one in spec["volumes"] if one["name"] == "metrics-tls")
    assert volume["secret"] == {"secretName": secret, "optional": True}
    options = _options("run", _container(values)["args"][1:])
    assert {str(options[f"metrics_tls_{part}"].parent) for part in ("cert", "key")} == {
        mount["mountPath"]
    }
    (endpoint,) = _found(rendering.objects({"monitoring": values["monitoring"]}), "PodMonitor")[
        "spec"
    ]["podMetricsEndpoints"]
    assert endpoint["tlsConfig"] == {"insecureSkipVerify": True}


def test_a_field_that_the_operator_does_not_know_is_found() -> None:
    # The operator's API for services has it.
    thing = _found(rendering.objects(examples.VALUES["monitoring"]), "PodMonitor")
    thing["spec"]["podMetricsEndpoints"][0]["bearerTokenFile"] = "/token"
    (found,) = kubernetes.problems(thing)
    assert found.endswith("podMetricsEndpoints[0].bearerTokenFile: is not known")


def test_prometheus_may_read_metrics_where_its_account_is_named() -> None:
    things = rendering.objects(examples.VALUES["monitoring"])
    name = "podgate-metrics-reader"
    (rule,) = _found(things, "ClusterRole", name)["rules"]
    assert rule == {"nonResourceURLs": ["/metrics"], "verbs": ["get"]}
    (subject,) = _found(things, "ClusterRoleBinding", name)["subjects"]
    assert subject == {"kind": "ServiceAccount", "name": "prometheus", "namespace": "monitoring"}
    bindings = [one for one in rendering.objects() if one["kind"] == "ClusterRoleBinding"]
    assert name not in {one["metadata"]["name"] for one in bindings}


def test_no_built_in_role_may_write_policies_unless_it_is_chosen() -> None:
    def aggregated(values: Json) -> dict[str, set[str]]:
        return {
            one["metadata"]["name"]: {
                name.rpartition("aggregate-to-")[2]
                for name in one["metadata"]["labels"]
                if "aggregate-to-" in name
            }
            for one in rendering.objects(values)
            if one["kind"] == "ClusterRole" and one["metadata"]["name"].endswith(("-view", "-edit"))
        }

    assert aggregated({}) == {"podgate-view": {"view", "edit", "admin"}, "podgate-edit": set()}
    chosen = aggregated({"rbac": {"aggregateEdit": True}})
    assert chosen["podgate-edit"] == {"edit", "admin"}
