"""The kubelet's semantics row by row, and the tests that hold podgate to each.

Rows are those of Kubernetes 1.36.2 (pkg/kubelet/prober, pkg/probe, pkg/kubelet/lifecycle) and of
what podgate must do otherwise (KEP-4559, KEP-2771, KEP-5999, KEP-4939). A test is `file::name`
below tests/, without `test_`; tests/probes/test_semantics.py finds each of them.
"""

from __future__ import annotations

from typing import Final

LOOP: Final = {
    "defaults": ["probes/spec/specs::defaults_are_those_of_the_api"],
    "validation": [
        "probes/spec/specs::mistakes_name_their_field",
        "probes/spec/specs::liveness_and_startup_are_stricter",
        "probes/spec/specs::liveness_may_have_its_own_grace_period",
        "probes/spec/probespec::error_names_the_path_of_the_wrong_field",
    ],
    "first probe at once, then every period": [
        "probes/engine/workers::first_probe_is_due_at_once",
        "probes/engine/workers::probes_keep_their_rhythm_however_long_they_take",
        "probes/engine/scheduler::probes_run_at_once_and_then_every_period_without_drift",
    ],
    "first probes spread after a start only": [
        "probes/engine/scheduler::starts_are_spread_if_configured"
    ],
    "immediate readiness run": [
        "probes/engine/workers::readiness_is_probed_as_soon_as_the_container_has_started",
        "probes/engine/workers::trigger_probes_now_and_restarts_the_rhythm",
        "probes/engine/workers::trigger_during_a_probe_schedules_one_more",
        "probes/engine/scheduled_pods::restarted_container_is_reported_and_probed_at_once",
    ],
    "initial delay": [
        "probes/engine/workers::initial_delay_counts_from_the_start_of_the_container",
        "probes/engine/workers::initial_delay_that_is_over_does_not_count",
    ],
    "start values": ["probes/engine/workers::initial_result"],
    "restart of the prober": [
        "probes/engine/workers::result_from_before_this_process_is_kept",
        "probes/engine/scheduled_pods::restored_results_count_until_the_first_of_this_process",
        "kernel/probing::a_restart_does_not_make_a_pod_unready",
    ],
    "startup gating": [
        "probes/engine/workers::others_wait_for_startup",
        "probes/engine/workers::startup_is_not_probed_once_started",
        "probes/engine/scheduled_pods::others_wait_for_startup_and_readiness_follows_at_once",
    ],
    "on hold": [
        "probes/engine/workers::startup_is_on_hold_after_either_result",
        "probes/engine/workers::liveness_is_on_hold_after_a_failure_only",
        "probes/engine/workers::readiness_is_never_on_hold",
        "probes/engine/workers::new_container_ends_the_hold_with_the_initial_result",
    ],
    "thresholds": [
        "probes/engine/workers::failures_below_the_threshold_change_nothing",
        "probes/engine/workers::failures_in_a_row_change_the_result_at_the_threshold",
        "probes/engine/workers::success_threshold",
        "probes/engine/workers::result_changes_only_after_a_full_run",
    ],
    "three tries, then thrown away": [
        "probes/engine/workers::prober_error_is_tried_three_times_at_once_and_thrown_away",
        "probes/engine/workers::prober_error_does_not_break_a_run_of_failures",
        "probes/engine/scheduler::prober_error_is_tried_three_times_and_reported_once",
    ],
    "termination": [
        "probes/engine/workers::deletion_ends_liveness_and_startup_with_success",
        "probes/engine/workers::readiness_goes_on_during_deletion",
        "probes/engine/scheduled_pods::deleted_pod_keeps_its_readiness_probe_only",
    ],
    "container that does not run": [
        "probes/engine/workers::container_that_does_not_run_fails_and_is_not_probed",
        "probes/engine/workers::container_that_will_not_run_again_ends_the_worker",
    ],
    "probe's grace period": ["probes/spec/specs::liveness_may_have_its_own_grace_period"],
    "cache by container id, changes only": [
        "probes/engine/scheduler::only_changes_are_reported",
        "probes/engine/scheduled_pods::answer_of_the_old_container_does_not_count_for_the_new",
    ],
    "result map": [
        "probes/engine/workers::warning_counts_as_success",
        "probes/engine/workers::unknown_counts_as_failure",
    ],
    "texts": ["probes/engine/passing::passing_names_the_first_probe_that_does_not"],
    "metrics": [
        "agent/probing/metrics::probes_are_counted_with_the_kubelets_labels",
        "agent/probing/metrics::series_of_a_pod_vanish_with_it_and_others_stay",
    ],
    "regular and restartable init containers": [
        "probes/spec/specs::restartable_init_container_is_probed",
        "probes/spec/specs::init_container_that_runs_once_cannot_be_probed",
    ],
}

HTTP: Final = {
    "200 to 399, 3xx is a warning": [
        "probes/protocols/http_get::two_hundreds_are_success",
        "probes/protocols/http_get::three_hundred_that_is_no_redirect_is_a_warning",
        "probes/protocols/http_get::redirect_without_location_is_a_warning",
    ],
    "redirect to a good page": [
        "probes/protocols/http_get::redirect_within_the_pod_is_followed",
        "probes/protocols/hypercorn::each_page_means_the_same_over_each_protocol",
    ],
    "redirect to an ill page": ["probes/protocols/http_get::redirect_to_an_ill_page_is_a_failure"],
    "redirect to another port": [
        "probes/protocols/http_get::redirect_to_another_port_of_the_pod_is_followed",
        "probes/engine/prober::redirect_to_another_port_of_the_pod_is_followed",
        "probes/protocols/https::redirect_from_http_to_https_is_followed",
    ],
    "redirect to another hostname": [
        "probes/protocols/http_get::redirect_to_another_host_is_a_warning_and_never_dialled",
        "probes/protocols/http_get::host_of_the_first_request_counts_not_of_the_last",
    ],
    "redirect loop": [
        "probes/protocols/http_get::redirect_loop_is_a_failure_after_ten_requests",
        "probes/engine/prober::endless_redirects_end",
    ],
    "hostile answers": [
        "probes/protocols/recorded::results_texts_and_requests_are_the_kubelets",
        "probes/protocols/recorded::results_over_real_connections_are_the_kubelets",
    ],
    "failure text": ["probes/protocols/http_get::other_codes_are_failures_without_the_body"],
    "body": [
        "probes/protocols/http1::body_is_cut_at_ten_kibibytes",
        "probes/protocols/http_get::body_that_breaks_off_is_a_prober_error",
    ],
    "one timeout for all": [
        "probes/engine/prober::all_redirects_share_one_timeout",
        "probes/protocols/http_get::time_over_in_the_body_is_a_prober_error",
        "probes/protocols/https::silent_tls_server_times_out",
    ],
    "URL": [
        "probes/protocols/http_get::path_is_sent_but_never_changes_where",
        "probes/spec/urls::request_target",
        "probes/spec/urls::bad_path_can_be_kept_as_is",
        "probes/spec/specs::handlers_are_read",
    ],
    "headers": [
        "probes/protocols/http1::bare_request_has_three_headers",
        "probes/protocols/http1::request_headers",
        "probes/protocols/hypercorn::server_sees_the_headers_of_a_probe",
    ],
    "Host": [
        "probes/protocols/http_get::host_header_replaces_the_address_in_the_request_only",
        "probes/protocols/http_get::host_header_is_kept_over_a_redirect_on_the_same_host",
    ],
    "TLS": [
        "probes/protocols/https::https_probe_of_a_server_with_an_untrusted_certificate",
        "probes/protocols/http_get::https_offers_http_1_1_only",
    ],
    "proxy": ["probes/engine/prober::no_proxy_is_ever_used"],
    "transport errors": ["probes/protocols/http_get::transport_errors_are_failures"],
}

OTHERS: Final = {
    "tcp": [
        "probes/engine/prober::tcp_probe_of_a_listener_succeeds",
        "probes/engine/prober::tcp_probe_of_a_closed_port_fails_at_once",
        "probes/engine/prober::tcp_probe_without_an_answer_times_out",
    ],
    "grpc": [
        "probes/protocols/grpc_health::request_is_that_of_the_kubelet",
        "probes/protocols/grpc_health::serving_is_success",
        "probes/protocols/grpc_health::any_other_status_is_failure",
        "probes/protocols/grpc_health::real_server_is_healthy",
    ],
    "grpc texts": [
        "probes/protocols/grpc_health::connect_timeout_is_reported_in_the_kubelets_words",
        "probes/protocols/grpc_health::response_timeout_is_reported_in_the_kubelets_words",
        "probes/protocols/grpc_health::server_without_the_health_service_is_reported",
    ],
    "exec": [
        "probes/engine/prober::exec_is_the_kubelets",
        "probes/engine/scheduler::exec_probe_is_never_run",
    ],
    "socket: an end and no reset, no TIME-WAIT": [
        "probes/protocols/closing::probe_leaves_no_port_in_time_wait",
        "probes/protocols/closing::server_that_probes_are_talking_to_sees_an_end_not_a_reset",
        "probes/protocols/closing::probes_in_a_row_never_run_out_of_ports",
    ],
    "HTTP2 (h2c)": [
        "probes/protocols/h2c::request_has_the_headers_of_a_probe",
        "probes/protocols/hypercorn::each_page_means_the_same_over_each_protocol",
    ],
    "grpc mode TLS": ["probes/protocols/grpc_health::real_server_with_tls"],
}

HOOKS: Final = {
    "any status is success": [
        "probes/engine/hooks::any_status_is_success",
        "probes/protocols/hypercorn::hook_reaches_the_server",
    ],
    "timeout": [
        "probes/engine/hooks::pre_stop_ends_with_the_grace_period",
        "probes/engine/hooks::post_start_waits_for_as_long_as_it_takes",
    ],
    "User-Agent, keep-alive": [
        "probes/engine/hooks::a_hook_introduces_itself_and_keeps_the_connection",
        "probes/engine/hooks::headers_of_the_spec_are_sent",
    ],
    "first address": ["probes/engine/hooks::a_hook_goes_to_the_first_address_only"],
    "https, not verified": [
        "probes/engine/hooks::https_hook_reaches_a_server_with_a_bad_certificate"
    ],
    "fallback to http without Authorization": [
        "probes/engine/hooks::https_hook_falls_back_to_a_plain_server",
        "probes/engine/hooks::fallback_goes_without_any_credentials",
        "probes/engine/hooks::only_the_words_of_a_plain_server_lead_to_plain_http",
        "probes/protocols/hypercorn::an_https_hook_of_a_plain_server_falls_back",
    ],
    "redirects": [
        "probes/engine/hooks::redirect_to_another_host_is_success_and_not_followed",
        "probes/engine/hooks::ten_redirects_are_a_failure",
    ],
    "other kinds": ["probes/spec/specs::hooks_of_other_kinds_are_not_podgates"],
}

PODGATES_OWN: Final = {
    "inside the pod's namespace": [
        "probes/netns::socket_is_in_the_namespace",
        "probes/engine/prober::server_of_the_node_is_not_reached",
        "probes/engine/prober::two_pods_with_the_same_address_are_distinguished",
        "kernel/agent::probes_run_from_inside_an_enforced_pod",
    ],
    "host is never dialled": [
        "probes/spec/specs::host_is_rejected_with_its_own_reason",
        "probes/spec/probespec::host_is_rejected_with_its_own_reason",
        "probes/fuzz::a_redirect_is_followed_only_to_the_same_hostname",
    ],
    "families": [
        "probes/engine/families::addresses_are_chosen_by_family_and_policy",
        "probes/engine/families::dual_stack_policies_need_both_families",
        "probes/engine/happy_eyeballs::second_family_answers_when_the_first_refuses",
        "kernel/probing::status_shows_the_address_family_that_answered",
    ],
    "localhost by request only": [
        "probes/engine/families::localhost_server_passes_only_by_request",
        "probes/engine/prober::localhost_only_server_is_not_reached",
    ],
    "https hook without a port": ["probes/spec/specs::hook_without_a_port_has_the_schemes"],
    "at the instant": [
        "probes/engine/hints::confirmed_close_is_probed_twice_and_counted_once",
        "probes/engine/hints::confirmed_close_counts_as_the_threshold_if_the_probe_specifies_it",
        "kernel/listener_watch::listener_that_opens_and_closes_is_seen_at_once",
    ],
    "probe spec that changes in place": ["kernel/probing::probe_spec_changes_in_place"],
}

TABLES: Final = {
    "loop": LOOP,
    "http": HTTP,
    "others": OTHERS,
    "hooks": HOOKS,
    "podgate's own": PODGATES_OWN,
}
