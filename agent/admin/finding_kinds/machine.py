"""Kinds of findings of the machine and the cluster, by the checks of `podgate doctor`."""

from agent.admin.finding_kinds.kind import BROKEN, DEGRADED, NOTE, OPEN, define

_APPLY = "Apply this version's manifests again ('kubectl apply -k deploy/manifests')."

PRIVILEGES_MISSING = define(
    "privileges-missing",
    BROKEN,
    "bpf(2) is not allowed, or cgroup v2 is not mounted.",
    "Run as root, with cgroup v2.",
)
PROGRAMS_MISSING = define(
    "programs-missing",
    BROKEN,
    "No prebuilt programs fit this kernel, and none can be compiled.",
    "Use podgate's image, or install the distribution's python3-bpfcc and use a virtual "
    "environment made with --system-site-packages.",
)
TCX_MISSING = define(
    "tcx-missing",
    NOTE,
    "The kernel has no tcx (Linux 6.6): gates are clsact filters.",
    "Nothing has to be done; a newer kernel has it.",
)
PROCESS_NAMES_MISSING = define(
    "process-names-missing",
    NOTE,
    "The kernel reports no process names to gates (Linux 6.16).",
    "Nothing has to be done; a newer kernel has it.",
)
COOKIES_MISSING = define(
    "netns-cookies-missing",
    DEGRADED,
    "The kernel has no netns cookies (Linux 5.14): no EPERM, and tunnels can bypass gates.",
    "Use a newer kernel.",
)
HOOK_TAKEN = define(
    "hook-taken",
    DEGRADED,
    "Another program is attached at the root cgroup so that podgate's hook cannot be.",
    "Have its owner attach it with BPF_F_ALLOW_MULTI.",
)
KUBELET_UNFOLLOWABLE = define(
    "kubelet-unfollowable",
    DEGRADED,
    "The kernel cannot follow the kubelet's restarts while no agent runs.",
    "Use a kernel with BTF and BPF trampolines (CONFIG_DEBUG_INFO_BTF).",
)
PACKET_SOCKETS_UNREJECTABLE = define(
    "packet-sockets-unrejectable",
    DEGRADED,
    "The kernel cannot reject packet sockets; --raw-sockets=deny-pods only counts them.",
    "Give no container CAP_NET_RAW on the host network; 'podgate drops' lists those that use it.",
)
UNCHECKED_SOCKETS = define(
    "packet-sockets-unchecked",
    DEGRADED,
    "Processes may have packet sockets from before podgate was installed.",
    "Restart these processes if you do not trust them.",
)
BPFFS_UNUSABLE = define(
    "bpffs-unusable",
    BROKEN,
    "The BPF file system is missing, read-only, or has pins that do not fit.",
    "Mount a BPF file system read-write, or name another with --bpffs.",
)
OTHER_PINS = define(
    "other-pins",
    DEGRADED,
    "Pins of another version exist.",
    "Start the agent: it removes them after the first sync.",
)
GATE_NOT_FIRST = define(
    "gate-not-first",
    OPEN,
    "A program of others runs before a gate: packets that it accepts pass no gate.",
    "The agent moves its gate first within seconds; if this stays, have the owner attach after it.",
    "bpftool net show",
)
PROGRAMS_UNREADABLE = define(
    "programs-unreadable",
    DEGRADED,
    "Programs that others attach where podgate does cannot be read.",
    "List them with 'bpftool net show' and 'bpftool cgroup tree'.",
)
BPFTOOL_MISSING = define(
    "bpftool-missing",
    NOTE,
    "bpftool is not installed, so 'podgate programs' does not work.",
    "Install the distribution's package bpftool (Debian; Ubuntu: linux-tools-common), or run the "
    "command in podgate's image.",
)
NFTABLES_MISSING = define(
    "nftables-missing",
    OPEN,
    "nft does not work: new pods are open until their gate is attached.",
    "Install nftables.",
)
TUN_ROUTES = define(
    "tun-routes",
    DEGRADED,
    "A tun interface carries traffic of other networks: its process reaches pods past gates.",
    "Let only trusted processes open them (mode of /dev/net/tun, CAP_NET_ADMIN).",
)
NET_ADMIN_PODS = define(
    "pods-with-net-admin",
    NOTE,
    "Pods with CAP_NET_ADMIN and no user namespace may change interfaces of the node.",
    "Set hostUsers: false in these pods, or remove NET_ADMIN, unless you trust them as root.",
)
RELAY_RANGES_TAKEN = define(
    "relay-ranges-unusable",
    DEGRADED,
    "Strict is unavailable on this node: a range is used, or the kernel lacks something.",
    "Solve that, or choose other ranges with --relay-range4 and --relay-range6.",
)
NETWORK_UNTRIED = define(
    "network-untried",
    DEGRADED,
    "The network plugin sends packets in ways that may bypass gates.",
    "Enforce only where PATH TEST in 'podgate status -o wide' is confirmed "
    "(docs/guides/networks.md).",
    "podgate status -o wide",
)
NETKIT = define(
    "netkit",
    DEGRADED,
    "Pods are connected by netkit devices, which have no gate.",
    "Configure the network plugin to use veth pairs.",
)
RUNTIME_NOT_FOUND = define(
    "runtime-not-found",
    BROKEN,
    "No container runtime responds.",
    "Mount the directory of the runtime's socket, or name the socket with --cri-socket.",
)
RUNTIME_NOT_READY = define(
    "runtime-not-ready",
    DEGRADED,
    "The container runtime reports that it is not ready: new pods do not start.",
    "Solve the reason in the sentence.",
)
API_SERVER_UNREACHABLE = define(
    "api-server-unreachable",
    BROKEN,
    "The API server does not answer.",
    "Check the route to it, and the account's token.",
)
RIGHT_MISSING = define(
    "right-missing",
    BROKEN,
    "The agent's account lacks a right without which pods are not protected or not Ready.",
    _APPLY,
)
RIGHT_MISSING_FEATURE = define(
    "right-missing-feature",
    DEGRADED,
    "The agent's account lacks a right of one feature, or its rights cannot be reviewed.",
    _APPLY,
)
DEFINITION_MISSING = define(
    "definition-missing",
    BROKEN,
    "HostAccessPolicies or NodeReports are not defined in the cluster, or in another version.",
    _APPLY,
)
DEFINITION_OTHER = define(
    "definition-other",
    DEGRADED,
    "A definition is of another version of podgate, or cannot be read.",
    _APPLY,
)
CLOCK_WRONG = define(
    "clock-wrong",
    DEGRADED,
    "This node's clock differs from the API server's: times in conditions and Events are wrong.",
    "Synchronise it, for instance by chrony or systemd-timesyncd.",
)
DNS_RULE_MISSING = define(
    "dns-rule-missing",
    DEGRADED,
    "The rule that admits the node to the cluster's DNS is not in force.",
    "Remove node-dns from --disable-default-rules, or write a HostAccessPolicy for it.",
)
