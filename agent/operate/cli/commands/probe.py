"""`podgate probe`; the probe itself runs in agent.operate.cli.commands.probe_runner."""

import asyncio
import pathlib
import re
import sys
from typing import TYPE_CHECKING, Any

import click
import msgspec

from agent.operate.cli.commands import options
from probes.spec.definitions import CertificateName
from probes.spec.handlers import KINDS, NAMES

if TYPE_CHECKING:
    from probes.results import ProbeOutcome
    from probes.spec.definitions import Handler

_HEADER = re.compile(r"([-A-Za-z0-9]+):[ \t]*([^\r\n]*)")
_ANY_PORT = 65535
_DAY = 86_400.0
_GIVEN = CertificateName(file="--cert")


class ProbeStep(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """One step. milliseconds: since the start; address: that it concerns."""

    milliseconds: float
    address: str
    text: str


class ProbeReport(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Result of one probe. families: that responded; address: the last one tried, if any."""

    result: str
    message: str
    milliseconds: float
    families: list[str]
    address: str | None
    steps: list[ProbeStep]


def _headers(
    context: click.Context, option: click.Parameter, given: tuple[str, ...]
) -> tuple[tuple[str, str], ...]:
    matches = [(text, _HEADER.fullmatch(text)) for text in given]
    for text, match in matches:
        if match is None:
            raise click.BadParameter(f"{text!r} is not 'Name: value'")
    return tuple((match[1], match[2]) for _, match in matches if match is not None)


@click.command(short_help="Run one probe and show each step.")
@click.option(
    "--netns",
    metavar="PATH",
    help="Network namespace of the pod: /run/netns/NAME or /proc/PID/ns/net.",
)
@click.option("--pod", metavar="NAME", help="Pod of the running agent: [NAMESPACE/]NAME.")
@click.argument("kind", type=click.Choice(NAMES))
@click.argument("port", type=click.IntRange(1, _ANY_PORT), required=False)
@click.option("--path", default="/", show_default=True, help="http: path and query.")
@click.option("--tls", is_flag=True, help="http: use https; grpc: mode TLS.")
@click.option(
    "--cert",
    "certificate",
    metavar="FILE",
    type=options.PATH,
    help="With --tls: client certificate, PEM.",
)
@click.option("--key", metavar="FILE", type=options.PATH, help="Its private key, PEM.")
@click.option("--h2c", is_flag=True, help="http: HTTP/2 without TLS.")
@click.option(
    "--header",
    "headers",
    metavar="'NAME: VALUE'",
    multiple=True,
    callback=_headers,
    help="http: additional request header.",
)
@click.option("--service", default="", help="grpc: service name.")
@click.option("--hook", is_flag=True, help="http: run as a lifecycle hook; any response passes.")
@click.option(
    "--timeout",
    "timeout_seconds",
    metavar="SECONDS",
    type=click.FloatRange(min=0.0, max=_DAY, min_open=True),
    default=1.0,
    show_default=True,
    help="Timeout in seconds.",
)
@click.option("--ip-family", type=click.Choice(["IPv4", "IPv6"]), help="Address family.")
@click.option(
    "--ip-family-policy",
    type=click.Choice(["SingleStack", "PreferDualStack", "RequireDualStack"]),
    help="Number of families required.",
)
@click.option("--localhost", is_flag=True, help="Probe 127.0.0.1 and ::1 in the pod.")
@options.output
@options.run_directory
def probe(
    netns: str | None,
    pod: str | None,
    kind: str,
    port: int | None,
    hook: bool,
    timeout_seconds: float,
    ip_family: Any,
    ip_family_policy: Any,
    localhost: bool,
    certificate: pathlib.Path | None,
    key: pathlib.Path | None,
    output: options.Format,
    run_directory: pathlib.Path,
    **given: Any,
) -> None:
    """Run one probe from inside a pod and show each step.

    A hook without PORT goes to 80, with --tls to 443 (KEP-2771).

    Exit status 0 if the probe passes, 1 if it fails.
    """
    from agent.operate.cli import output as screens
    from agent.operate.cli.commands import probe_runner
    from probes.spec.definitions import Probe

    if (netns is None) == (pod is None):
        raise click.UsageError("name the pod by either --netns PATH or --pod NAME")
    if timeout_seconds != timeout_seconds:
        raise click.BadParameter("nan is not a time", param_hint="--timeout")
    if hook and kind != "http":
        raise click.UsageError("--hook requires http")
    if port is None:
        if not hook:
            raise click.UsageError("name the PORT; only a hook has a default: 80, with --tls 443")
        port = 443 if given["tls"] else 80
    if (certificate is None) != (key is None):
        raise click.UsageError("--cert and --key belong together")
    if certificate and (hook or not given["tls"]):
        raise click.UsageError("--cert is for probes with --tls")
    request = Probe(
        _handler(kind, port, has_certificate=certificate is not None, **given),
        timeout_seconds=timeout_seconds,
        ip_family=ip_family,
        ip_family_policy=ip_family_policy,
        target="localhost" if localhost else "pod",
    )
    steps: list[ProbeStep] = []

    def on_step(milliseconds: float, address: str, text: str) -> None:
        steps.append(ProbeStep(milliseconds=round(milliseconds, 3), address=address, text=text))
        if output.is_table:
            click.echo(f"{milliseconds:9.1f} ms  {address}  {text}")

    async def work() -> "ProbeOutcome":
        location: probe_runner.ProbeLocation
        if netns is not None:
            location = await probe_runner.find_netns(netns)
        else:
            location = await probe_runner.find_pod(str(pod), run_directory)
        certificates = {}
        if certificate and key:
            certificates[_GIVEN] = probe_runner.read_certificate(certificate, key)
        return await probe_runner.run(
            location, request, is_hook=hook, on_step=on_step, certificates=certificates
        )

    outcome = asyncio.run(work())
    end = f"{outcome.duration_seconds * 1000:9.1f} ms  {probe_runner.describe(outcome)}"
    screens.write(_document(outcome, steps), output, lambda _: click.echo(end))
    sys.exit(0 if outcome.passed else 1)


def _handler(
    kind: str,
    port: int,
    *,
    path: str,
    tls: bool,
    h2c: bool,
    headers: tuple[tuple[str, str], ...],
    service: str,
    has_certificate: bool,
) -> "Handler":
    from probes.spec.definitions import Grpc, HttpGet, TlsPolicy

    policy = TlsPolicy(certificate=_GIVEN) if has_certificate else None
    match kind:
        case "http":
            if tls and h2c:
                raise click.UsageError("--h2c is HTTP/2 without TLS: leave out --tls")
            return HttpGet(
                *(port, path),
                scheme="HTTPS" if tls else "HTTP",
                headers=headers,
                protocol="HTTP2" if h2c else "HTTP1",
                tls=policy,
            )
        case "grpc":
            return Grpc(port, service, "TLS" if tls else "Plaintext", policy)
    made: Handler = next(one.struct(port) for one in KINDS.values() if one.name == kind)
    return made


def _document(outcome: "ProbeOutcome", steps: list[ProbeStep]) -> ProbeReport:
    return ProbeReport(
        result=outcome.result.value,
        message=outcome.message,
        milliseconds=round(outcome.duration_seconds * 1000, 3),
        families=list(outcome.families),
        address=outcome.address,
        steps=steps,
    )
