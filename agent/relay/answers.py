"""Probes that the relay answers, and the verdicts to answer them with."""

from collections.abc import Iterable, Mapping

from agent.relay.messages import Answer, AnswerOutcome, GrpcRequest, HttpRequest, Verdict
from agent.relay.probe_requests import grpc_request, prepare_grpc


class AnsweredProbe:
    """One answer of a target, and its verdict."""

    __slots__ = ("answer", "verdict")

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.verdict: Verdict | None = None

    def outcome(self, now_ns: int) -> AnswerOutcome:
        """The answer to a probe at this time of CLOCK_BOOTTIME, or why there is none."""
        verdict = self.verdict
        if verdict is None or verdict.ends_ns is None:
            return "no_verdict"
        if now_ns >= verdict.ends_ns:
            return "stale"
        return "healthy" if verdict.is_healthy else "unhealthy"


class PortAnswers:
    """The answers of one port. `tcp` excludes all others."""

    __slots__ = ("grpc", "http", "needs_pod", "probes", "tcp")

    def __init__(self, probes: tuple[AnsweredProbe, ...]) -> None:
        self.probes = probes
        self.http: dict[bytes, AnsweredProbe] = {}
        """By the request, complete."""
        self.grpc: dict[bytes, AnsweredProbe] = {}
        """By the frame that ends the request."""
        self.tcp: AnsweredProbe | None = None
        self.needs_pod = any(probe.answer.needs_pod for probe in probes)
        for probe in probes:
            match probe.answer.request:
                case HttpRequest(sent):
                    self.http[sent] = probe
                case GrpcRequest(service):
                    prepare_grpc()
                    self.grpc[grpc_request(service)] = probe
                case _ if len(probes) == 1:
                    self.tcp = probe

    def missing(self, now_ns: int) -> list[AnswerOutcome]:
        """Why probes cannot be answered now; empty if all can."""
        outcomes = (probe.outcome(now_ns) for probe in self.probes)
        return [outcome for outcome in outcomes if outcome in ("no_verdict", "stale")]


NO_ANSWERS = PortAnswers(())
"""Those of a port whose connections are all proxied."""


class TargetAnswers:
    """All answers of one target, by port."""

    __slots__ = ("_by_id", "by_port")

    def __init__(self) -> None:
        self._by_id: dict[int, AnsweredProbe] = {}
        self.by_port: Mapping[int, PortAnswers] = {}

    def set_answers(self, answers: Iterable[Answer]) -> None:
        """Replace the answers. One that is the same as before keeps its verdict; the others' end,
        also for requests that are pending."""
        previous = self._by_id
        self._by_id = {}
        ports: dict[int, list[AnsweredProbe]] = {}
        for answer in answers:
            probe = previous.get(answer.id)
            if probe is None or probe.answer != answer:
                probe = AnsweredProbe(answer)
            else:
                del previous[answer.id]
            self._by_id[answer.id] = probe
            ports.setdefault(answer.port, []).append(probe)
        for removed in previous.values():
            removed.verdict = None
        self.by_port = {port: PortAnswers(tuple(probes)) for port, probes in ports.items()}

    def set_verdict(self, verdict: Verdict) -> None:
        """Store a verdict. That of an unknown answer is ignored: the answer was removed before."""
        if probe := self._by_id.get(verdict.answer_id):
            probe.verdict = verdict
