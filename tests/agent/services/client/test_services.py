"""The client library: whole states, again and again, whatever happens to the server."""

import asyncio
import contextlib
import datetime
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent import futures

import grpc
import pytest

from agent.client.base import StreamError
from agent.services.client import services as clients
from agent.services.client.services import ServicesClient, ServicesState
from agent.services.client.v1alpha1 import endpoints_pb2 as pb
from tests.agent.services.api.conftest import WAIT_SECONDS, Served
from tests.agent.services.api.making import service

ROOT = pathlib.Path(__file__).parents[4]
HEADER = pb.NextItem(next=pb.NextFilter(instance_id=7, rev=3))
WEB = pb.NextItem(services=pb.Services(items=[pb.ServiceEndpoints(name="web")]))


def after(header: pb.NextItem) -> pb.NextFilter:
    """The next request of a client that has the state with this header."""
    return pb.NextFilter(
        instance_id=header.next.instance_id, rev=header.next.rev, accepts_delta=True
    )


def end(count: int) -> pb.NextItem:
    return pb.NextItem(end=pb.End(service_count=count))


@contextlib.contextmanager
def scripted(path: pathlib.Path, *streams: list[pb.NextItem]) -> Iterator[list[pb.NextFilter]]:
    """A server that sends one stream per call; yields the requests."""
    requests: list[pb.NextFilter] = []
    left = iter(streams)

    def answer(request: pb.NextFilter, context: grpc.ServicerContext) -> Iterator[pb.NextItem]:
        requests.append(request)
        yield from next(left, [HEADER, end(0)])

    with futures.ThreadPoolExecutor(2) as pool:
        server = grpc.server(pool)
        handler = grpc.unary_stream_rpc_method_handler(
            answer,
            request_deserializer=pb.NextFilter.FromString,
            response_serializer=pb.NextItem.SerializeToString,
        )
        service = "podgate.localnet.v1alpha1.Endpoints"
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(service, {"Next": handler}),)
        )
        server.add_insecure_port(f"unix:{path}")
        server.start()
        try:
            yield requests
        finally:
            server.stop(None).wait()


def client_of(path: pathlib.Path, problems: list[str] | None = None) -> ServicesClient:
    on_problem = problems.append if problems is not None else lambda problem: None
    return ServicesClient(f"unix:{path}", error_delay_seconds=0.01, on_problem=on_problem)


@pytest.mark.parametrize(
    "broken",
    [
        [],
        [HEADER],
        [HEADER, WEB],
        [WEB, end(1)],
        [HEADER, WEB, end(2)],
        [HEADER, HEADER, end(0)],
        [HEADER, pb.NextItem(), end(0)],
    ],
)
def test_incomplete_state_is_discarded(tmp_path: pathlib.Path, broken: list[pb.NextItem]) -> None:
    problems: list[str] = []
    with scripted(tmp_path / "s", broken, broken, [HEADER, WEB, end(1)]) as requests:
        with contextlib.closing(client_of(tmp_path / "s", problems)) as client:
            state = client.next()
        assert state is not None
        assert (state.instance_id, state.rev) == (7, 3)
        assert [one.name for one in state.services] == ["web"]
        assert requests == [pb.NextFilter()] * 3
    assert problems == [
        "cannot read the service endpoints of this node: the response is incomplete"
    ]


def test_each_call_continues_from_the_last_state(tmp_path: pathlib.Path) -> None:
    with scripted(tmp_path / "s") as requests:
        with contextlib.closing(client_of(tmp_path / "s")) as client:
            client.next()
            client.next()
        assert requests == [pb.NextFilter(), after(HEADER)]


def test_first_call_continues_from_the_given_state(tmp_path: pathlib.Path) -> None:
    with scripted(tmp_path / "s") as requests:
        client = ServicesClient(f"unix:{tmp_path / 's'}", instance_id=5, rev=9)
        with contextlib.closing(client):
            client.next()
        assert requests == [pb.NextFilter(instance_id=5, rev=9)]


def test_failed_request_raises_one_sentence(tmp_path: pathlib.Path) -> None:
    with (
        contextlib.closing(client_of(tmp_path / "nobody")) as client,
        pytest.raises(StreamError, match="cannot read"),
    ):
        client.once(WAIT_SECONDS)


def test_impossible_position_is_rejected_at_once() -> None:
    with pytest.raises(ValueError, match="-1"):
        ServicesClient("unix:/nowhere", rev=-1)


async def test_once_has_a_time_limit(served: Served, client: ServicesClient) -> None:
    await served.start(is_complete=False)
    with pytest.raises(StreamError, match=r"within 0\.2 s") as caught:
        await asyncio.to_thread(client.once, 0.2)
    assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
    await asyncio.to_thread(client.close)


async def test_server_that_starts_later_is_found(served: Served, client: ServicesClient) -> None:
    asking = asyncio.create_task(asyncio.to_thread(client.next))
    await asyncio.sleep(0.1)
    await served.start()
    state = await asyncio.wait_for(asking, WAIT_SECONDS)
    await asyncio.to_thread(client.close)
    assert state is not None
    assert [one.name for one in state.services] == ["web"]


@pytest.mark.parametrize("is_there", [False, True])
async def test_cancelling_ends_a_wait(
    served: Served, client: ServicesClient, is_there: bool
) -> None:
    if is_there:
        await served.start()
        await asyncio.to_thread(client.next)
    asking = asyncio.create_task(asyncio.to_thread(client.next))
    await asyncio.sleep(0.05)
    await asyncio.to_thread(client.cancel)
    assert await asyncio.wait_for(asking, WAIT_SECONDS) is None
    assert await asyncio.to_thread(client.next) is None
    await asyncio.to_thread(client.close)


async def test_iterating_gives_each_change(served: Served, client: ServicesClient) -> None:
    await served.start()
    seen: asyncio.Queue[ServicesState] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def follow() -> None:
        for state in client:
            loop.call_soon_threadsafe(seen.put_nowait, state)

    following = asyncio.create_task(asyncio.to_thread(follow))
    async with asyncio.timeout(WAIT_SECONDS):
        assert len((await seen.get()).services) == 1
        await served.change("api")
        assert len((await seen.get()).services) == 2
        await asyncio.to_thread(client.cancel)
        await following
    await asyncio.to_thread(client.close)


PROGRAM = """
from agent.services.client import services as client
client.run(lambda state: print(state.rev, *(one.name for one in state.services), flush=True))
"""


def start(*arguments: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "GRPC_VERBOSITY": "NONE"},
    )


async def test_program_runs_once_and_prints_how_to_continue(served: Served) -> None:
    await served.start()
    program = start("--target", served.target, "--once")
    told, said = await asyncio.to_thread(program.communicate, timeout=WAIT_SECONDS)
    known = f"--instance-id {served.publisher.instance_id} --rev 1"
    assert (told, said) == ("1 web\n", f"to continue: {known}\n")
    program = start("--target", served.target, "--once", *known.split())
    await served.change("api")
    told, _ = await asyncio.to_thread(program.communicate, timeout=WAIT_SECONDS)
    assert told == "2 api web\n"


async def test_program_has_options_for_the_filter(served: Served) -> None:
    await served.start()
    served.publisher.store.set_service(None, service("np", type="NodePort"))
    await served.publisher.wait_newer(served.publisher.instance_id, 1)
    common = ("--target", served.target, "--once")
    for options, told in (
        (("--type", "NodePort"), "np"),
        (("--type", "NodePort", "--type", "ClusterIP", "--family", "IPv4"), "np web"),
        (("--namespace", "other"), ""),
        (("--namespace", "other", "--namespace", "default"), "np web"),
        (("--service-proxy-name", "own"), ""),
        (
            ("--labels", "*", "--annotations", "*", "--all-endpoints", "--endpoint-details"),
            "np web",
        ),
    ):
        program = start(*common, *options)
        out, _ = await asyncio.to_thread(program.communicate, timeout=WAIT_SECONDS)
        assert (out.split(maxsplit=1)[1:] or [""])[0].strip() == told
    program = start(*common, "--type", "Any")
    _, said = await asyncio.to_thread(program.communicate, timeout=WAIT_SECONDS)
    assert program.returncode == 2
    assert "invalid choice: 'Any'" in said


def test_options_of_a_program_are_the_fields_of_its_requests(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    requested = pb.NextFilter(
        namespaces=["a", "b"],
        types=[pb.SERVICE_TYPE_NODE_PORT, pb.SERVICE_TYPE_EXTERNAL_NAME],
        families=[pb.ADDRESS_FAMILY_IPV6],
        label_patterns=["*"],
        annotation_patterns=["example.org/*", "x"],
        service_proxy_name="own",
        all_endpoints=True,
        endpoint_details=True,
        node="n",
        instance_id=7,
        rev=2,
    )
    echoed = pb.NextFilter()
    echoed.CopyFrom(requested)
    echoed.rev = 3
    states: list[ServicesState] = []
    with scripted(tmp_path / "s", [pb.NextItem(next=echoed), end(0)]) as requests:
        clients.run(
            states.append,
            [
                *("--once", "--target", f"unix:{tmp_path / 's'}", "--error-delay", "0"),
                *("--instance-id", "7", "--rev", "2", "--namespace", "a", "--namespace", "b"),
                *("--type", "NodePort", "--type", "ExternalName", "--family", "IPv6"),
                *("--labels", "*", "--annotations", "example.org/*", "--annotations", "x"),
                *("--service-proxy-name", "own", "--all-endpoints", "--endpoint-details"),
                *("--node", "n"),
            ],
        )
    assert requests == [requested]
    assert states == [ServicesState(7, 3, ())]
    assert capsys.readouterr() == ("", "to continue: --instance-id 7 --rev 3\n")


def test_help_of_a_program_has_the_values_of_its_options(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        clients.run(print, ["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "--namespace TEXT only services of it; may be repeated" in shown
    assert "--type {ClusterIP,NodePort,LoadBalancer,ExternalName} only services of it" in shown
    assert "--family {IPv4,IPv6} only addresses of it; may be repeated" in shown


def test_saved_state_has_the_time_when_it_was_saved(tmp_path: pathlib.Path) -> None:
    at = datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)
    saved = pb.NextItem(next=HEADER.next, saved_at=at)
    with (
        scripted(tmp_path / "s", [saved, end(0)], [HEADER, end(0)]),
        contextlib.closing(client_of(tmp_path / "s")) as client,
    ):
        assert client.next() == ServicesState(7, 3, (), at)
        assert client.next() == ServicesState(7, 3, ())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_program_exits_on_a_signal(served: Served, number: signal.Signals) -> None:
    await served.start()
    program = start("--target", served.target)
    assert program.stdout is not None
    assert await asyncio.to_thread(program.stdout.readline) == "1 web\n"
    program.send_signal(number)
    _, said = await asyncio.to_thread(program.communicate, timeout=WAIT_SECONDS)
    assert (program.returncode, said) == (0, "")


async def test_program_prints_that_no_server_responds(tmp_path: pathlib.Path) -> None:
    program = start("--target", f"unix:{tmp_path / 'nobody'}")
    assert program.stderr is not None
    said = await asyncio.to_thread(program.stderr.readline)
    assert said.startswith("cannot read the service endpoints of this node")
    program.terminate()
    await asyncio.to_thread(program.communicate, timeout=WAIT_SECONDS)


def test_client_needs_nothing_of_the_agent() -> None:
    code = (
        "import sys, agent.services.client.services;"
        "print(sorted({name.partition('.')[0] for name in sys.modules}"
        " & {'agent', 'aiohttp', 'bpf', 'click', 'msgspec', 'probes', 'structlog'}),"
        " sorted(name for name in sys.modules if name.startswith('agent.')))"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert told.stdout == (
        "['agent'] ['agent.client', 'agent.client.aio', 'agent.client.base', "
        "'agent.services', 'agent.services.client', 'agent.services.client.service_states', "
        "'agent.services.client.services', 'agent.services.client.v1alpha1', "
        "'agent.services.client.v1alpha1.endpoints_pb2']\n"
    ), told.stderr


def test_server_that_is_not_grpc_is_a_problem_and_not_an_error(tmp_path: pathlib.Path) -> None:
    problems: list[str] = []
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()

        def answer() -> None:
            with contextlib.suppress(OSError):
                while True:
                    taken, _ = listener.accept()
                    taken.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                    taken.close()

        answering = threading.Thread(target=answer)
        answering.start()
        client = client_of(tmp_path / "s", problems)
        timer = threading.Timer(0.5, client.cancel)
        timer.start()
        assert client.next() is None
        timer.join()
        client.close()
        listener.shutdown(socket.SHUT_RDWR)
        answering.join(WAIT_SECONDS)
    assert len(problems) == 1
    assert clients.DEFAULT_TARGET == "unix:///run/podgate/localnet/localnet.sock"
