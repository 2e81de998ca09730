"""The mutants that are the same program: nothing that a test could observe differs.

They count neither as killed nor as survivors (Jia and Harman, "An Analysis and Survey of the
Development of Mutation Testing", 2011, section 3). A mutant is listed once it has survived and was
read; one that costs more time or memory is no such mutant.
"""

import ast
import pathlib
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Equivalent:
    """A line of a function, what a mutant makes of it, and why that is the same."""

    path: str
    function: str
    """The outermost one, such as "Pace.handled"."""
    before: str
    after: str
    reason: str

    @property
    def difference(self) -> str:
        """Without blanks, as mutants have others than the formatter."""
        return _without_blanks(f"-{self.before}+{self.after}")


EQUIVALENTS = (
    Equivalent(
        "agent/api/conditions/owned_conditions.py",
        "OwnedConditions.see_pod",
        "if session := self._sessions.get(record.session or 0):",
        "if session := self._sessions.get(record.session or -1):",
        "sessions are numbered from 1",
    ),
    Equivalent(
        "agent/api/publisher.py",
        "Publisher.__init__",
        "self.instance_id = instance_id or 1 + secrets.randbelow(_MAX_INSTANCE_ID)",
        "self.instance_id = instance_id or 2 + secrets.randbelow(_MAX_INSTANCE_ID)",
        "a random number that is not 0",
    ),
    Equivalent(
        "agent/app/flow_reporting.py",
        "FlowReporting._admitted",
        "flows=flows - before[rule] if flows >= before[rule] else flows,",
        "flows=flows - before[rule] if flows > before[rule] else flows,",
        "equal ones are left out below",
    ),
    Equivalent(
        "agent/backoff.py",
        "Pace.handled",
        "seconds = self._base_seconds * 2.0 ** min(doublings, 32) if doublings >= 0 else 0.0",
        "seconds = self._base_seconds * 2.0 ** min(doublings, 32) if doublings >= 0 else -1.0",
        "due now, and since a second, are both due",
    ),
    Equivalent(
        "agent/cni/conflist.py",
        "without_entry",
        "end = spans[1].start if len(spans) > 1 else spans[0].end",
        "end = spans[1].start if len(spans) > 1 else spans[-1].end",
        "there is one",
    ),
    Equivalent(
        "agent/cri/sandboxes.py",
        "_container_order",
        "return container.created.timestamp() if container.created else 0.0, container.attempt",
        "return container.created.timestamp() if container.created else -1.0, container.attempt",
        "before every container's time",
    ),
    Equivalent(
        "agent/cri/sandboxes.py",
        "_container_order",
        "return container.created.timestamp() if container.created else 0.0, container.attempt",
        "return container.created.timestamp() if container.created else 1.0, container.attempt",
        "before every container's time",
    ),
    Equivalent(
        "agent/flows/otlp.py",
        "OtlpOutput._check",
        "if not 200 <= status < 300:",
        "if not 199 <= status < 300:",
        "a response below 200 is no final one (RFC 9110, 15.2)",
    ),
    Equivalent(
        "agent/flows/tally.py",
        "Tally.account",
        "if counted < self._counted.get(ifindex, 0):",
        "if counted < self._counted.get(ifindex, -1):",
        "no count is negative",
    ),
    Equivalent(
        "agent/gates/gate_thread.py",
        "GateThread._wake_up",
        "if self._wake >= 0:",
        "if self._wake >= 1:",
        "descriptor 0 is standard input",
    ),
    Equivalent(
        "agent/kube/client.py",
        "ApiClient._send",
        "if response.status >= 300:",
        "if response.status >= 299:",
        "no server sends 299",
    ),
    Equivalent(
        "agent/kube/connection.py",
        "_keepalive_socket",
        "sock = socket.socket(*info[:3])",
        "sock = socket.socket(*info[:2])",
        "TCP is the default protocol of a stream socket",
    ),
    Equivalent(
        "agent/kube/lists.py",
        "ListSplitter.feed",
        "self._scan_from_bytes = len(self._content) + (len(self._content) - self._scanned) // 2",
        "self._scan_from_bytes = len(self._content) + (len(self._content) + self._scanned) // 2",
        "when the content is scanned next; all of it is at the end",
    ),
    Equivalent(
        "agent/kube/lists.py",
        "ListSplitter.feed",
        "self._scan_from_bytes = len(self._content) + (len(self._content) - self._scanned) // 2",
        "self._scan_from_bytes = len(self._content) + (len(self._content) - self._scanned) // 1",
        "when the content is scanned next; all of it is at the end",
    ),
    Equivalent(
        "agent/linux/beneath.py",
        "_open",
        "if found < 0:",
        "if found <= 0:",
        "descriptor 0 is standard input",
    ),
    Equivalent(
        "agent/linux/cgroups.py",
        "_with_hidden",
        "return [0] * (root_level(root) or 0) + ids",
        "return [0] * (root_level(root) or -1) + ids",
        "both make an empty list",
    ),
    Equivalent(
        "agent/linux/cgroups.py",
        "cgroup_paths",
        "break",
        "continue",
        "nothing more is found",
    ),
    Equivalent(
        "agent/linux/cgroups.py",
        "cgroup2_mount",
        'if len(fields) < 5 or after.split(b" ")[0] != b"cgroup2":',
        'if len(fields) <= 5 or after.split(b" ")[0] != b"cgroup2":',
        "a line has six fields before its dash (proc_pid_mountinfo(5))",
    ),
    Equivalent(
        "agent/linux/inotify.py",
        "_open",
        "if descriptor < 0:",
        "if descriptor <= 0:",
        "descriptor 0 is standard input",
    ),
    Equivalent(
        "agent/linux/inotify.py",
        "_drain",
        "while os.read(descriptor, 65536):",
        "while os.read(descriptor, 65537):",
        "read until nothing is left",
    ),
    Equivalent(
        "agent/linux/link_monitor.py",
        "LinkMonitor.run",
        "if self._socket.fileno() < 0:",
        "if self._socket.fileno() < 1:",
        "descriptor 0 is standard input",
    ),
    Equivalent(
        "agent/linux/packets.py",
        "_open_capture",
        "attach_filter(capture, [*program, (_RETURN, 0, 0, 0xFFFF), (_RETURN, 0, 0, 0)])",
        "attach_filter(capture, [*program, (_RETURN, 0, 0, 65536), (_RETURN, 0, 0, 0)])",
        "no packet is longer",
    ),
    Equivalent(
        "agent/linux/packets.py",
        "_open_capture",
        "attach_filter(capture, [*program, (_RETURN, 0, 0, 0xFFFF), (_RETURN, 0, 0, 0)])",
        "attach_filter(capture, [*program, (_RETURN, 1, 0, 0xFFFF), (_RETURN, 0, 0, 0)])",
        "a return has no jumps",
    ),
    Equivalent(
        "agent/linux/packets.py",
        "_open_capture",
        "attach_filter(capture, [*program, (_RETURN, 0, 0, 0xFFFF), (_RETURN, 0, 0, 0)])",
        "attach_filter(capture, [*program, (_RETURN, 0, 0, 0xFFFF), (_RETURN, 1, 0, 0)])",
        "a return has no jumps",
    ),
    Equivalent(
        "agent/linux/rtnetlink.py",
        "read",
        "messages = await netlink.dump(_RTM_GETLINK, _request(0), netns=netns)",
        "messages = await netlink.dump(_RTM_GETLINK, _request(-1), netns=netns)",
        "a dump has all interfaces",
    ),
    Equivalent(
        "agent/linux/rtnetlink.py",
        "_request",
        "return _IFINFO.pack(0, 0, ifindex, 0, 0) + mask",
        "return _IFINFO.pack(0, 0, ifindex, 0, 1) + mask",
        "a request that reads changes no flags",
    ),
    Equivalent(
        "agent/policy/suggested_yaml.py",
        "_document",
        "lines += yaml.safe_dump(document, sort_keys=False, width=1000).splitlines()",
        "lines += yaml.safe_dump(document, sort_keys=False, width=999).splitlines()",
        "no line is as long",
    ),
    Equivalent(
        "agent/relay/raw_sockets.py",
        "PortListener.__init__",
        "self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)",
        "self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 2)",
        "any number but 0 is on",
    ),
    Equivalent(
        "agent/serving/peer_process.py",
        "PeerProcess.cgroup",
        "has_ended = self._pidfd < 0 or bool(select.select([self._pidfd], [], [], 0)[0])",
        "has_ended = self._pidfd < 1 or bool(select.select([self._pidfd], [], [], 0)[0])",
        "descriptor 0 is standard input",
    ),
    Equivalent(
        "agent/serving/peer_process.py",
        "_pidfd",
        "return int(_DESCRIPTOR.unpack(found)[0])",
        "return int(_DESCRIPTOR.unpack(found)[-1])",
        "there is one",
    ),
    Equivalent(
        "bpf/btf.py",
        "_Types.named",
        "if at < 0:",
        "if at < 1:",
        "names come after the header",
    ),
    Equivalent(
        "bpf/btf.py",
        "_Types.named",
        "at = self._start - 1",
        "at = self._start - 2",
        "what is not aligned is no type",
    ),
    Equivalent(
        "bpf/btf.py",
        "_Marks.before_id",
        "while len(self._positions) <= index and not self._is_complete:",
        "while len(self._positions) < index and not self._is_complete:",
        "it is then found from an earlier mark",
    ),
    Equivalent(
        "bpf/drop_sources.py",
        "DropSources.cgroups",
        "return {_CGROUP.unpack(key)[0] for key, _ in self._cgroups.items()}",
        "return {_CGROUP.unpack(key)[-1] for key, _ in self._cgroups.items()}",
        "there is one",
    ),
    Equivalent(
        "bpf/syscalls.py",
        "is_cgroup_link_attached",
        'return bool(struct.unpack_from("=Q", object_info(link_fd, 24), 16)[0])',
        'return bool(struct.unpack_from("=Q", object_info(link_fd, 24), 16)[-1])',
        "there is one",
    ),
    Equivalent(
        "bpf/syscalls.py",
        "is_cgroup_link_attached",
        'return bool(struct.unpack_from("=Q", object_info(link_fd, 24), 16)[0])',
        'return bool(struct.unpack_from("=Q", object_info(link_fd, 25), 16)[0])',
        "what follows is not read",
    ),
    Equivalent(
        "probes/go_quoting.py",
        "_character",
        'return f"\\\\u{code:04x}" if code < 0x10000 else f"\\\\U{code:08x}"',
        'return f"\\\\u{code:04x}" if code < 65537 else f"\\\\U{code:08x}"',
        "U+10000 is printable",
    ),
    Equivalent(
        "probes/protocols/grpc_health.py",
        "_decode_varint",
        "break",
        "continue",
        "no later index is in the data",
    ),
    Equivalent(
        "probes/protocols/http1_chunks.py",
        "_int64",
        "return number if -_WRAP < number < _WRAP else (number + _WRAP) % (2 * _WRAP) - _WRAP",
        "return number if -_WRAP < number < _WRAP else (number - _WRAP) % (2 * _WRAP) - _WRAP",
        "both are equal modulo 2 * _WRAP",
    ),
    Equivalent(
        "probes/protocols/http1_chunks.py",
        "_int64",
        "return number if -_WRAP < number < _WRAP else (number + _WRAP) % (2 * _WRAP) - _WRAP",
        "return number if _WRAP < number < _WRAP else (number + _WRAP) % (2 * _WRAP) - _WRAP",
        "the other branch leaves small numbers as they are",
    ),
    Equivalent(
        "probes/protocols/http_get.py",
        "HttpExchange.receive",
        "or (reader.length or 0) > _REDIRECT_BODY_BYTES",
        "or (reader.length or 1) > _REDIRECT_BODY_BYTES",
        "one byte is not too long, either",
    ),
    Equivalent(
        "probes/protocols/protobuf.py",
        "varint",
        "if 0 <= value < 0x80:",
        "if 1 <= value < 0x80:",
        "the loop encodes 0 as well",
    ),
    Equivalent(
        "probes/protocols/protobuf.py",
        "varint",
        "if 0 <= value < 0x80:",
        "if 0 < value < 0x80:",
        "the loop encodes 0 as well",
    ),
    Equivalent(
        "probes/spec/apiprobes.py",
        "read_probe",
        'timeout = fields.integer("timeoutSeconds", default=1, minimum=0) or 1',
        'timeout = fields.integer("timeoutSeconds", default=0, minimum=0) or 1',
        "0 is replaced by 1",
    ),
    Equivalent(
        "probes/spec/specs.py",
        "_number",
        "port = named.get(port) or (int(port) if port.isascii() and port.isdecimal() else 0)",
        "port = named.get(port) or (int(port) if port.isascii() and port.isdecimal() else -1)",
        "neither is a port",
    ),
    Equivalent(
        "probes/spec/specs.py",
        "_number",
        "return port if type(port) is int and 1 <= port <= PORT_MAX else 0",
        "return port if type(port) is int and 0 <= port <= PORT_MAX else 0",
        "0 is what follows for all others",
    ),
    Equivalent(
        "agent/controller/leader_client.py",
        "LeaderClient.request",
        "remaining = self.lease.remaining_seconds() if self.lease else 0.0",
        "remaining = self.lease.remaining_seconds() if self.lease else -1.0",
        "nothing is left in both",
    ),
    Equivalent(
        "agent/linux/directories.py",
        "open_private",
        "descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)",
        "descriptor = os.open(path, os.O_RDONLY & os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)",
        "mkdir raises for what is no directory",
    ),
    Equivalent(
        "agent/operate/explain/pods.py",
        "NamedPods.find",
        "return found[0]",
        "return found[-1]",
        "there is one",
    ),
    Equivalent(
        "agent/operate/kubectl/findings.py",
        "Merged.places",
        'return f"{self.pods[0]} on {listed(self.nodes)}"',
        'return f"{self.pods[-1]} on {listed(self.nodes)}"',
        "there is one",
    ),
)


def is_equivalent(path: str, function: str, difference: str) -> bool:
    """difference: the lines of a diff."""
    found = path, function, _without_blanks(difference)
    return any(found == (one.path, one.function, one.difference) for one in EQUIVALENTS)


def stale(root: pathlib.Path) -> Iterator[Equivalent]:
    """Those whose function does not have their line."""
    for one in EQUIVALENTS:
        lines = map(_without_blanks, _function(root / one.path, one.function))
        if _without_blanks(one.before) not in lines:
            yield one


def _function(path: pathlib.Path, name: str) -> list[str]:
    """Its lines; none if there is no such function."""
    source = path.read_text()
    node: ast.AST = ast.parse(source)
    for part in name.split("."):
        found = [one for one in ast.iter_child_nodes(node) if getattr(one, "name", "") == part]
        if not found:
            return []
        node = found[-1]
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    return source.splitlines()[node.lineno - 1 : node.end_lineno]


def _without_blanks(text: str) -> str:
    return "".join(text.split())
