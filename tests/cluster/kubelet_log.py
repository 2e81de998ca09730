"""What the kubelet's log has about probes: each result, and what the kubelet concluded.

Lines are klog's (`I1122 20:46:54.123456 PID file.go:1] "Message" key="value" ...`) of
pkg/kubelet/prober/prober.go ("Probe failed" at -v=1, "Probe succeeded" at -v=3),
pkg/kubelet/kubelet.go ("SyncLoop (probe)" at -v=1) and
pkg/kubelet/kuberuntime/kuberuntime_container.go ("Killing container with a grace period",
"Container exited normally" after it).
"""

import dataclasses
import datetime
import pathlib
import re
from collections.abc import Iterator

VERBOSITY = "-v=4"

_LINE = re.compile(r'[IEW](\d{4} \d\d:\d\d:\d\d\.\d{6}) +\d+ [^ ]+\] "((?:[^"\\]|\\.)*)"(.*)')
_FIELD = re.compile(r' (\w+)=(?:"((?:[^"\\]|\\.)*)"|(\S+))')
_RESULTS = {"Probe failed": False, "Probe succeeded": True}


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """One probe of the kubelet. seconds: of the wall clock, when it ended."""

    seconds: float
    kind: str
    is_success: bool
    output: str


@dataclasses.dataclass(frozen=True, slots=True)
class Conclusion:
    """The kubelet's reaction to results that crossed a threshold. what: such as "liveness
    unhealthy", or "killed", and "exited" after that."""

    seconds: float
    what: str


@dataclasses.dataclass(frozen=True, slots=True)
class PodLog:
    """All lines of one pod, in order."""

    results: tuple[Result, ...]
    conclusions: tuple[Conclusion, ...]


def of_pod(log: pathlib.Path, namespace: str, name: str) -> PodLog:
    results = []
    conclusions = []
    for seconds, message, fields in _lines(log, f'pod="{namespace}/{name}"'):
        if message in _RESULTS:
            kind = fields["probeType"].lower()
            text = fields.get("output", "")
            results.append(Result(seconds, kind, _RESULTS[message], text))
        elif message == "SyncLoop (probe)":
            what = f"{fields['probe']} {fields['status']}".strip()
            conclusions.append(Conclusion(seconds, what))
        elif message == "Killing container with a grace period":
            conclusions.append(Conclusion(seconds, "killed"))
        elif message == "Container exited normally":
            conclusions.append(Conclusion(seconds, "exited"))
    return PodLog(tuple(results), tuple(conclusions))


def _lines(log: pathlib.Path, marker: str) -> Iterator[tuple[float, str, dict[str, str]]]:
    year = datetime.datetime.now().astimezone().year
    with log.open(errors="replace") as lines:
        for line in lines:
            if marker in line and (match := _LINE.match(line)):
                when = datetime.datetime.strptime(f"{year}{match[1]}", "%Y%m%d %H:%M:%S.%f")
                fields = {name: quoted or plain for name, quoted, plain in _FIELD.findall(match[3])}
                yield when.astimezone().timestamp(), match[2], fields
