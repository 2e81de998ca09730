"""Why goals are not met, as far as it was found: shown on the page below the goals."""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Reason:
    """bench, figures: of the goals it is about; "_*" at the end of a figure stands for all that
    begin so. text: Markdown: what bounds them, by which figures, and what was tried."""

    bench: str
    figures: tuple[str, ...]
    text: str

    def is_about(self, bench: str, figure: str) -> bool:
        return bench == self.bench and any(
            figure.startswith(one.removesuffix("*")) if one.endswith("_*") else figure == one
            for one in self.figures
        )


REASONS = (
    Reason(
        "rest",
        (
            "0_pods_enforce_no_probes_agent_wakeups_per_second",
            "250_pods_enforce_no_probes_agent_wakeups_per_second",
        ),
        """**Wake-ups.** Timers of the agent fire at common ticks, and one thread makes all reads
that may block and are due at one of them (agent/batches.py): the kubelet's process every two
seconds and, with it, the marks of `podgate off`, the readiness file and directories whose events
may be lost. A batch wakes the event loop twice and its thread once or twice, for the interpreter's
lock. In a cluster gRPC's own threads are added: a server and a channel without a call take
`bare_grpc_wakeups_per_second`, without podgate.""",
    ),
    Reason(
        "rest",
        ("enforce_no_probes_cpu_250_over_100_pods", "strict_no_probes_cpu_250_over_100_pods"),
        """**Growth with pods.** What is left is compared every 5 to 30 seconds for all pods in case
that an event was lost (the relay's ways, links, chains, existing flows), and the kernel's
comparison of rules inside pods in strict once a second (agent/strict/hookless_pods.py), which
replaced a connection to each pod every five seconds. From 100 to 250 pods that is 0.06 % of a core
in enforce, and 0.14 in strict for the agent.""",
    ),
    Reason(
        "rest",
        ("100_pods_strict_tcp_probes_agent_and_relay_pss_mb",),
        """**Memory.** 17 MB of the agent is code of modules, of 37 MB that Python allocates
(tracemalloc). Without other Python processes on the machine, which share libraries, the agent has
4 MB more and the relay 0.5. What is left to win is in libraries: OpenSSL and HTTP, which the API
server needs, command lines, metrics. Tried without a gain: bytecode without columns or docstrings
(0.2 MB); msgspec without typing_extensions in the relay (0.3 MB, by a trick with sys.modules).""",
    ),
    Reason(
        "cluster",
        ("agent_cpu_over_kubelet_at_rest",),
        """**CPU at rest beside the kubelet.** By a profile of its loop (`py-spy record -r 250`
while `PODGATE_BENCH_PARTS=rest make bench BENCH=cluster` rests) two thirds are the 20 http probes a
second: setns, socket, connect, send and close 56 %, the look-up of who accepted 10 %. Among few a
probe takes 650 us, five times as long as back to back (`cpu_us_http_50`), since the processor's
caches have other programs' data by then. Strict mode's checks are 8 %, the loop itself 7 %, no
other part has more than 2 %. A fifth of all is what the agent takes with 100 pods in strict without
probes (`100_pods_strict_no_probes_agent_cpu_percent`). The goal is what probes and an idle agent
take alone.""",
    ),
    Reason(
        "cluster",
        ("relay_cpu_over_kubelet_at_rest",),
        """**The relay at rest.** 0.05 of the kubelet's share is 180 us for each of its 20 probes a
second. At that rate a loop of accept, connect, two copies and close takes half as long again in
Python, and nearly as long in C, without namespaces, held SYNs or time limits:
`cpu_us_per_resting_probe` of bench `relay`, its baseline and `bare_c_cpu_us_per_resting_probe`.""",
    ),
    Reason(
        "cluster",
        ("burst_60_pods_seconds",),
        """**60 pods at once** share both processors with the agent; see the next one.""",
    ),
    Reason(
        "burst",
        ("burst_250_ready_ratio", "burst_250_agent_cpu_ms_per_pod"),
        """**Bursts.** The agent's share of two processors is what delays others. By a profile a
fifth of it is probes, which these pods have every second; a tenth lists and events of the runtime;
the rest is shared by 40 components, none with more than 5 %: a birth is 370 callbacks in 157 turns
of the event loop, 20 reads in threads and 6.5 calls of the runtime. Tried: uvloop (no difference),
plans and messages for changed pods only (72 to 62 ms), one request for what the runtime has
reported. 11 ms is the agent's own start, which the figure counts.""",
    ),
    Reason(
        "probe",
        ("http_cpu_over_kubelet_ratio_*",),
        """**http.** A loop of connect, send, receive and close in Python takes 0.32 of Go's
(`bare_http_cpu_over_kubelet_ratio_1`). A probe of podgate enters the pod's namespace for its
socket (eight system calls), has a deadline beside all others, examines who accepted, and reads the
answer as Go does in 6,946 recorded cases. Below 0.45 these would have to cost less than the
connection itself.""",
    ),
    Reason(
        "probe",
        ("https_cpu_over_kubelet_ratio_*",),
        """**https.** A loop in Python that does nothing but connect, shake hands, send, receive
and close takes 0.84 of Go's (`bare_https_cpu_over_kubelet_ratio_1`): OpenSSL's client needs that
for a new session. The kubelet resumes none, and a resumed one would not try what the kubelet
tries. OpenSSL 3.5 gave the same ratios as 3.0.""",
    ),
    Reason(
        "probe",
        ("tcp_by_lookup_over_kubelet_ratio",),
        """**tcp by lookups.** The lookup itself is 0.1 us; a group of probes with one rhythm is
one system call. The 5 us are each probe's durations in histograms and the list of recent probes,
passed on together, in this bench after five periods, and a wake-up for each group.""",
    ),
    Reason(
        "probe",
        ("cpu_percent_1000_tcp_by_default", "tcp_by_default_over_kubelet_ratio"),
        """**tcp as the agent runs it** connects in every 16th period, for what lookups do not see:
at 190 us for a connection these alone are 12 us a probe. 0.5 % would leave such faults unseen for
hours of ten-second periods.""",
    ),
)
