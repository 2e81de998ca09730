"""Where the state of each kind of finding is made: a test, and what it asserts there.

The chain to the user is: this test makes the state and asserts its fact, tests/agent/admin/
test_findings.py (or the named test itself) has the finding of that fact, and
tests/agent/operate/test_front_ends.py shows that all front ends print it with one severity and one
sentence.
"""

import ast
import functools
import pathlib

from agent.admin.finding_kinds import KINDS

_ROOT = pathlib.Path(__file__).parents[2]

MADE: dict[str, dict[str, dict[str, str]]] = {
    "agent/api/conditions/test_owned_conditions.py": {
        "test_owner_that_is_gone_and_awaited_is_a_finding": {
            "condition-owner-gone": "CONDITION_OWNER_GONE",
        },
        "test_invalid_owner_is_a_finding_and_its_last_valid_version_stays": {
            "condition-owner-invalid": "CONDITION_OWNER_INVALID",
        },
    },
    "agent/flows/test_outlet.py": {
        "test_output_that_rejects_for_a_minute_is_a_finding": {
            "flows-not-written": "FLOWS_NOT_WRITTEN",
        },
    },
    "agent/kube/test_pod_reading.py": {
        "test_probe_that_sends_the_kubelet_elsewhere_is_a_warning_and_a_problem_of_the_pod": {
            "probe-host-not-allowed": "ProbeHostNotAllowed"
        }
    },
    "agent/pods/test_pod_modes.py": {
        "test_labels_from_before_a_removal_close_nothing_until_they_are_confirmed": {
            "mode-left-behind": "kubectl label namespace shop podgate.io/left-behind-",
        },
    },
    "kernel/test_losses.py": {
        "test_interface_that_cannot_be_gated_is_named": {"interface-not-supported": "NotSupported"}
    },
    "agent/policy/cluster_network_policies/test_source.py": {
        "test_object_that_is_not_understood_is_a_problem_and_closes_nothing": {
            "cluster-network-policy-not-understood": "is not understood, and not evaluated",
        },
    },
    "node/test_policy_ready.py": {
        "test_without_an_engine_the_owner_chooses_and_a_finding_is_reported": {
            "policy-not-programmed": "POLICY_NOT_PROGRAMMED",
        },
        "test_pod_without_a_witness_waits_and_a_finding_is_reported": {
            "policy-not-checked": "POLICY_NOT_CHECKED",
        },
    },
    "node/test_cluster_network_policies.py": {
        "test_policy_closes_a_pod_until_it_is_deleted": {
            "cluster-network-policy-not-followed": "CLUSTER_NETWORK_POLICY_NOT_FOLLOWED",
        },
    },
    "agent/app/test_isolation_conditions.py": {
        "test_relay_that_answers_differently_changes_conditions_of_its_pods_alone": {
            "strict-unavailable": "the relay does not respond",
        },
    },
    "agent/app/test_reconciler_faults.py": {
        "test_a_failed_attach_is_retried_and_reported": {
            "gate-failed": '"GateFailed"',
        },
        "test_what_a_gate_has_no_room_for_is_in_the_condition": {
            "gate-not-updated": "gate_problem",
        },
    },
    "agent/app/test_servers.py": {
        "test_agent_starts_without_a_port_that_is_taken_and_gets_it_later": {
            "port-not-open": "made.problems()",
        },
    },
    "agent/controller/test_policies.py": {
        "test_namespace_that_does_not_exist_is_named": {
            "policy-namespace-missing": "NamespaceMissing",
        },
    },
    "agent/gates/test_path_test.py": {
        "test_a_capture_that_cannot_be_opened_is_a_failed_test": {
            "path-test-failed": "FAILED",
        },
    },
    "agent/gates/test_pod_gates.py": {
        "test_path_that_is_no_namespace_is_named": {
            "netns-unusable": "NetnsInvalid",
        },
        "test_pod_without_an_interface_waits_for_one": {
            "pod-starting": "NoInterface",
        },
    },
    "agent/kube/test_api_pods.py": {
        "test_annotation_without_effect_is_published": {
            "annotation-ignored": "annotation_problems",
        },
    },
    "agent/kube/test_watcher.py": {
        "test_a_minute_of_errors": {
            "watch-broken": "seen.watcher.problem",
        },
    },
    "kernel/test_host_egress_agent.py": {
        "test_what_a_node_cannot_put_in_force_is_a_finding_and_an_invalid_policy_too": {
            "host-egress-not-in-force": "HOST_EGRESS_NOT_IN_FORCE",
        },
    },
    "agent/kubelet/test_host_probes.py": {
        "test_nothing_is_denied_while_the_api_server_might_be": {
            "host-probes-not-denied": "are not denied",
        },
    },
    "agent/kubelet/test_pods_api.py": {
        "test_pod_that_ends_while_the_kubelet_is_away_goes_by_the_api_server": {
            "kubelet-api-missing": "not seen.kubelet.is_connected",
        },
    },
    "agent/linux/test_pods_cgroup.py": {
        "test_node_without_pods_has_no_such_cgroup": {
            "pods-cgroup-missing": "identity() is None",
        },
    },
    "agent/operate/doctor/test_agent.py": {
        "test_answer_that_is_no_report_is_another_versions": {
            "agent-unreadable": "AGENT_UNREADABLE",
        },
        "test_dns_rule_is_checked_in_a_cluster": {
            "dns-rule-missing": "DNS_RULE_MISSING",
        },
    },
    "agent/operate/doctor/test_cluster.py": {
        "test_api_server_that_does_not_answer_is_one_problem": {
            "api-server-unreachable": "API_SERVER_UNREACHABLE",
        },
        "test_clock_is_compared_with_the_api_servers": {
            "clock-wrong": "s ahead of the API server's",
        },
    },
    "agent/operate/doctor/test_cni.py": {
        "test_plugin_that_may_bypass_gates_is_a_warning": {
            "network-untried": "expected in finding.sentence",
        },
        "test_two_causes_are_two_findings": {
            "netkit": "netkit",
        },
    },
    "agent/operate/doctor/test_host.py": {
        "test_kernel_without_cookies_of_namespaces": {"netns-cookies-missing": "COOKIES_MISSING"},
        "test_programs_of_others_that_cannot_be_read": {
            "programs-unreadable": "PROGRAMS_UNREADABLE",
        },
        "test_tun_that_carries_traffic_of_others": {
            "tun-routes": "TUN_ROUTES",
        },
        "test_without_privileges_nothing_else_is_checked": {
            "privileges-missing": "PRIVILEGES_MISSING",
        },
    },
    "agent/operate/doctor/test_machine.py": {
        "test_missing_or_broken_runtime_is_a_problem": {
            "runtime-not-found": "RUNTIME_NOT_FOUND",
        },
        "test_runtime_that_is_not_ready_is_a_warning": {
            "runtime-not-ready": "RUNTIME_NOT_READY",
        },
    },
    "agent/operate/kubectl/test_cluster_findings.py": {
        "test_controller_without_an_available_replica_is_missing": {
            "controller-missing": "CONTROLLER_MISSING",
        },
        "test_image_that_is_nowhere_is_named_at_once": {
            "roll-out-stuck": "ROLL_OUT_STUCK",
        },
        "test_node_that_the_daemonset_no_longer_selects_is_not_a_silent_one": {
            "no-answer": "NO_ANSWER",
            "node-left": "NODE_LEFT",
        },
        "test_rights_to_webhooks_that_no_job_uses_are_found": {
            "webhook-rights-left": "WEBHOOK_RIGHTS_LEFT",
        },
        "test_webhook_of_a_previous_release_is_found": {
            "webhook-obsolete": "WEBHOOK_OBSOLETE",
        },
        "test_webhook_without_a_bundle_is_not_trusted": {
            "webhook-untrusted": "WEBHOOK_UNTRUSTED",
        },
    },
    "agent/operate/pinned/test_agent_process.py": {
        "test_agent_without_an_answer": {
            "agent-starting": "findings.agent_finding(status).kind == kind.name",
        },
    },
    "agent/operate/pinned/test_exposures.py": {
        "test_fresh_heartbeat_is_counted_down": {
            "declared-ports-open-soon": "not found[0].is_open"
        },
        "test_after_the_dead_man_time_all_gates_are_open": {
            "gates-open": "All gates are open",
        },
    },
    "agent/policy/test_effects.py": {
        "test_policy_that_selects_no_pod_is_a_problem_after_a_minute": {
            "policy-without-effect": "selects no pod of this node",
        },
    },
    "agent/probing/test_answers.py": {
        "test_same_request_of_a_proxied_probe_is_ambiguous": {
            "probe-not-answered": "AMBIGUOUS",
        },
    },
    "agent/services/api/test_source.py": {
        "test_saved_services_are_served_with_their_age_without_an_api_server": {
            "services-old": "saved_at",
        },
    },
    "agent/sources/test_cluster.py": {
        "test_source_is_not_ready_before_listed_sandboxes_are_in_the_store": {
            "pods-not-synced": "unready_reason is not None",
        },
    },
    "agent/sources/test_standalone.py": {
        "test_next_agent_has_the_pods_while_the_kubelet_is_away": {
            "kubelet-unreachable": "does not respond: connection refused",
        },
    },
    "agent/sources/test_manifests.py": {
        "test_invalid_manifest_is_one_problem": {
            "manifest-invalid": "manifest_problem",
        },
    },
    "cluster/test_doctor.py": {
        "test_account_without_its_role_lacks_all_rights": {
            "right-missing": "The account may not patch pods/status",
            "right-missing-feature": "len(cluster.RIGHTS)",
        },
        "test_definition_that_is_missing_or_of_another_version_is_found": {
            "definition-other": "DEFINITION_OTHER",
        },
    },
    "cni/test_installing.py": {
        "test_agent_that_finds_the_plugin_being_removed_reports_that": {
            "cni-plugin-missing": "not status.is_installed",
        },
    },
    "kernel/test_default_deny_life.py": {
        "test_missing_nft_is_reported_in_one_sentence_and_changes_nothing": {
            "default-deny-missing": "reason_unavailable == (",
        },
    },
    "kernel/test_descriptors.py": {
        "test_agent_without_descriptors_keeps_its_gates_and_recovers": {
            "component-failing": "COMPONENT_FAILED",
        },
    },
    "kernel/test_doctor.py": {
        "test_packet_socket_from_before_podgate_is_a_warning": {
            "packet-sockets-unchecked": "older.sentence"
        },
        "test_pod_that_may_change_the_nodes_interfaces_is_named": {
            "pods-with-net-admin": "result.sentence"
        },
        "test_another_package_named_bcc_is_a_problem": {
            "programs-missing": "PROGRAMS_MISSING",
        },
        "test_dead_agent_is_a_problem_that_names_what_is_in_force": {
            "agent-dead": "AGENT_DEAD",
            "gates-open-soon": "GATES_OPEN_SOON",
        },
        "test_directory_without_bpffs_is_a_problem": {
            "bpffs-unusable": "BPFFS_UNUSABLE",
        },
        "test_missing_bpftool_is_a_warning": {
            "bpftool-missing": "BPFTOOL_MISSING",
        },
        "test_missing_nft_is_a_warning": {
            "nftables-missing": "NFTABLES_MISSING",
        },
        "test_on_a_good_machine_only_the_agent_is_missing": {
            "tcx-missing": "TCX_MISSING",
            "process-names-missing": "PROCESS_NAMES_MISSING",
            "kubelet-unfollowable": "KUBELET_UNFOLLOWABLE",
            "packet-sockets-unrejectable": "PACKET_SOCKETS_UNREJECTABLE",
            "agent-missing": "AGENT_MISSING",
        },
        "test_pins_of_another_version_are_a_warning": {
            "other-pins": "OTHER_PINS",
        },
        "test_program_before_a_gate_is_a_problem_and_one_after_it_is_named": {
            "gate-not-first": "runs before the gate on",
        },
        "test_program_that_excludes_hooks_is_named": {
            "hook-taken": "HOOK_TAKEN",
        },
        "test_running_agent_is_checked": {
            "kubelet-unknown": "KUBELET_UNKNOWN",
        },
    },
    "kernel/test_existing_flows.py": {
        "test_existing_connection_stays_open_and_is_counted": {
            "existing-flows": "still open",
        },
    },
    "kernel/test_findings.py": {
        "test_agent_that_hangs_is_not_a_dead_one": {
            "agent-hung": "AGENT_HUNG",
        },
        "test_gate_that_is_detached_and_a_hook_that_is_gone_while_the_agent_is_dead": {
            "hook-missing": "HOOK_MISSING",
            "gate-detached": "GATE_DETACHED",
        },
        "test_label_that_is_no_mode": {
            "label-ignored": "LABEL_IGNORED",
        },
        "test_node_that_is_switched_off": {
            "off": "OFF",
        },
        "test_path_around_a_gate_that_is_found_later": {
            "gate-bypassed": "GATE_BYPASSED",
        },
        "test_state_that_cannot_be_written": {
            "state-not-written": "STATE_NOT_WRITTEN",
        },
    },
    "kernel/test_held_syns.py": {
        "test_last_syn_that_fits_reports_that_the_relay_is_full": {
            "relay-full": "is_full",
        },
    },
    "kernel/test_kubelet_admission.py": {
        "test_path_at_which_other_users_can_make_cgroups_is_not_followed": {
            "kubelet-not-followed": "admission.problem.startswith",
        },
    },
    "kernel/test_kubelet_unknown.py": {
        "test_open_ports_are_reported_until_the_kubelet_is_found": {
            "declared-ports-open": "DECLARED_PORTS_OPEN",
        },
    },
    "kernel/test_raw_socket_policy.py": {
        "test_agent_denies_reports_and_follows_policies": {
            "guard-denied": "GUARD_DENIED",
        },
        "test_kernel_whose_hooks_have_no_effect_is_a_problem": {
            "raw-sockets-not-denied": "so none is rejected",
        },
    },
    "kernel/test_relay_pair.py": {
        "test_range_in_use_is_reported_and_strict_falls_back_to_enforce": {
            "relay-missing": "RELAY_MISSING",
            "relay-ranges-unusable": "RELAY_RANGES_TAKEN",
        },
    },
    "kernel/test_lookup_agent.py": {
        "test_connections_that_fail_beside_a_listener_with_room_are_a_finding": {
            "probe-lookups-differ": "PROBE_LOOKUPS_DIFFER",
        },
    },
    "kernel/test_answered_mtls.py": {
        "test_answer_follows_the_pod_and_never_the_lack_of_a_certificate": {
            "probe-certificate": "PROBE_CERTIFICATE",
        },
    },
    "kernel/test_redirected.py": {
        "test_probe_that_is_redirected_is_reported_and_decides_nothing": {
            "probe-redirected": "PROBE_REDIRECTED",
        },
    },
    "kernel/test_strict_fallback.py": {
        "test_without_fallback_a_pod_whose_relay_is_off_reports_why_its_probes_fail": {
            "relay-missing-probes-fail": "The kubelet's probes fail (--strict-without-fallback)",
        },
    },
    "node/test_input.py": {
        "test_an_address_that_only_the_pod_claims_is_an_event": {
            "address-unconfirmed": "unconfirmed",
        },
    },
    "node/test_lives.py": {
        "test_restarted_container_is_probed_again": {
            "probe-failing": "ProbeFailing",
        },
    },
    "node/test_modes.py": {
        "test_ceiling_of_the_node_limits_labels_and_is_reported": {
            "mode-limited": "is limited to audit by the node's label",
        },
        "test_pods_label_is_less_strict_only_where_the_namespace_allows_it": {
            "mode-not-allowed": "is less strict than enforce and is ignored",
        },
        "test_restart_without_api_and_saved_state_opens_no_gate": {
            "mode-kept": "The gate keeps mode enforce",
        },
        "test_unreadable_label_opens_nothing_also_over_a_restart": {
            "label-invalid": "which is no mode",
        },
    },
    "node/test_outages.py": {
        "test_agent_without_the_api_continues_from_the_saved_state": {
            "conditions-not-written": "pending_conditions == 1",
        },
    },
    "agent/nri/test_client.py": {
        "test_socket_that_nothing_listens_on_is_a_problem": {
            "nri-not-connected": "does not respond: Connection refused.",
        },
    },
    "node/test_policies.py": {
        "test_cluster_without_the_resource_has_no_policies": {
            "definition-missing": "DEFINITION_MISSING",
        },
        "test_policy_admits_until_it_is_deleted": {
            "policy-not-applied": "podgate_policy_problems 1.0",
        },
    },
    "runtime/test_sandboxes.py": {
        "test_hanging_runtime_is_reported_and_changes_nothing": {
            "runtime-unreachable": "did not respond",
        },
    },
}
"""By file below tests and function: kinds whose state it makes, and what it asserts of each."""

UNMADE: dict[str, str] = {}
"""Kinds that no test makes, with the reason."""


@functools.cache
def _functions(path: str) -> dict[str, str]:
    """Source by name."""
    text = (_ROOT / path).read_text("utf-8")
    lines = text.splitlines(keepends=True)
    return {
        node.name: "".join(lines[node.lineno - 1 : node.end_lineno])
        for node in ast.walk(ast.parse(text))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    }


def problems() -> list[str]:
    """Kinds without a test, and tests that do not make the state any more."""
    made = [kind for file in MADE.values() for kinds in file.values() for kind in kinds]
    found = [f"{kind} has no test." for kind in KINDS if kind not in (*made, *UNMADE)]
    found += [f"{kind} is no kind." for kind in (*made, *UNMADE) if kind not in KINDS]
    found += [f"{kind} is made by a test." for kind in UNMADE if kind in made]
    for path, functions in MADE.items():
        sources = _functions(path)
        for name, kinds in functions.items():
            found += [
                f"{kind}: {name} of {path} does not assert {assertion!r}."
                for kind, assertion in kinds.items()
                if assertion not in sources.get(name, "")
            ]
    return found
