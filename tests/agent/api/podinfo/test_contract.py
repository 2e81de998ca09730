"""What a reader may rely on, over the real socket."""

import asyncio
import importlib.util
import pathlib
import stat
import subprocess
import sys
from types import ModuleType
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from agent import labels
from agent.api.podinfo import merge
from agent.api.podinfo.methods import GET, LIST, PODINFO, WATCH
from agent.client.v1alpha1 import podinfo_pb2
from tests.agent.api.podinfo.serving import PATIENCE_SECONDS, Node, code_of

_ROOT = pathlib.Path(__file__).parents[4]
NOT_FOUND = grpc.StatusCode.NOT_FOUND
UNREADY = grpc.StatusCode.FAILED_PRECONDITION


@pytest.fixture(scope="session")
def stubs(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """What grpc_tools makes of the definition, as for any reader."""
    made = tmp_path_factory.mktemp("stubs")
    subprocess.run(
        [
            *(sys.executable, "-m", "grpc_tools.protoc", "-I."),
            *(f"--grpc_python_out={made}", "agent/client/v1alpha1/podinfo.proto"),
        ],
        cwd=_ROOT,
        check=True,
        timeout=60,
    )
    path = made / "agent/client/v1alpha1/podinfo_pb2_grpc.py"
    spec = importlib.util.spec_from_file_location("podinfo_pb2_grpc", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


async def test_generated_stubs_list_get_and_watch(node: Node, stubs: ModuleType) -> None:
    node.add("b")
    pod = node.add("a")
    async with node.serving(), node.channel() as channel:
        stub = stubs.PodInfoStub(channel)
        listed = [
            one
            async for one in stub.ListPodConditions(
                podinfo_pb2.ListPodConditionsRequest(), timeout=PATIENCE_SECONDS
            )
        ]
        assert [[one.pod_name for one in response.pods] for response in listed] == [["a", "b"]]
        got = await stub.GetPodConditions(
            podinfo_pb2.GetPodConditionsRequest(pod_uid=pod.uid), timeout=PATIENCE_SECONDS
        )
        assert got.pod == listed[0].pods[0]
        assert (got.instance_id, got.rev) == (listed[0].instance_id, listed[0].rev)
        watch = stub.WatchPodConditions(
            podinfo_pb2.WatchPodConditionsRequest(), timeout=PATIENCE_SECONDS
        )
        first = await watch.read()
        assert list(first.pods) == list(listed[0].pods)
        node.set(pod, False)
        second = await watch.read()
        assert second.rev == first.rev + 1
        passing = {one.type: one for one in second.pods[0].conditions}[labels.PROBES_PASSING]
        assert passing.status == podinfo_pb2.CONDITION_STATUS_FALSE
        assert passing.source == podinfo_pb2.CONDITION_SOURCE_PODGATE
        assert passing.observe_time.seconds >= passing.last_transition_time.seconds > 0
        watch.cancel()


async def test_reader_that_has_only_reflection_can_list(node: Node) -> None:
    node.add("web")
    async with node.serving(), node.channel() as channel:
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)

        async def reflected(**fields: Any) -> Any:
            request = reflection_pb2.ServerReflectionRequest(**fields)
            async for answer in reflection.ServerReflectionInfo(
                iter([request]), timeout=PATIENCE_SECONDS
            ):
                return answer
            raise AssertionError("no answer")

        services = (await reflected(list_services="")).list_services_response.service
        assert PODINFO in {one.name for one in services}
        pool = descriptor_pool.DescriptorPool()
        wanted = [(await reflected(file_containing_symbol=PODINFO)).file_descriptor_response]
        files = {}
        while wanted:
            for content in wanted.pop().file_descriptor_proto:
                file = descriptor_pb2.FileDescriptorProto.FromString(content)
                files[file.name] = file
                for name in file.dependency:
                    if name not in files:
                        answer = await reflected(file_by_filename=name)
                        wanted.append(answer.file_descriptor_response)
        for file in reversed(files.values()):
            pool.Add(file)
        method = pool.FindServiceByName(PODINFO).methods_by_name["ListPodConditions"]
        call = channel.unary_stream(
            f"/{PODINFO}/{method.name}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=message_factory.GetMessageClass(method.output_type).FromString,
        )
        request = message_factory.GetMessageClass(method.input_type)()
        names = [[pod.pod_name for pod in one.pods] async for one in call(request)]
        assert names == [["web"]]


async def test_calls_fail_before_the_list_is_complete(node: Node) -> None:
    node.unready_because = "the API server has not told of the pods yet"
    pod = node.add("web")
    async with node.serving() as calls, node.channel() as channel:
        health = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service=PODINFO)
        for ask in (calls.listed, lambda: calls.got(pod.uid), lambda: calls.watched().read()):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await ask()
            code, details = code_of(caught.value)
            assert code is UNREADY
            assert "the API server has not told of the pods yet" in details
        answer = await health.Check(request, timeout=PATIENCE_SECONDS)
        assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
        watching = health.Watch(request, timeout=PATIENCE_SECONDS)
        assert (await watching.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        node.unready_because = None
        assert (await watching.read()).status == health_pb2.HealthCheckResponse.SERVING
        watching.cancel()
        assert [one.pod_name for one in (await calls.listed()).pods] == ["web"]
        # What is lost later stays known.
        node.unready_because = "the container runtime does not answer"
        node.add("other")
        watch = calls.watched()
        while len((await watch.read()).pods) < 2:
            pass
        watch.cancel()


async def test_calls_fail_after_a_restart_until_the_list_is_complete(node: Node) -> None:
    node.add("web")
    async with node.serving() as calls:
        before = await calls.listed()
    node.unready_because = "not every pod has been looked at yet"
    async with node.serving() as calls:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await calls.watched(before.instance_id, before.rev).read()
        assert caught.value.code() is UNREADY
        node.unready_because = None
        await node.publisher.is_ready.wait()
        after = await calls.watched(before.instance_id, before.rev).read()
        assert after.instance_id != before.instance_id
        assert [one.pod_name for one in after.pods] == ["web"]


@pytest.mark.parametrize("uid", ["", "nobody", "uid-web2", "x" * 1000])
async def test_unknown_uid_is_not_found(node: Node, uid: str) -> None:
    node.add("web")
    async with node.serving() as calls:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await calls.got(uid)
        assert caught.value.code() is NOT_FOUND


async def test_deleted_pod_is_not_found_and_not_listed(node: Node) -> None:
    pod = node.add("web")
    node.add("stays")
    async with node.serving() as calls:
        watch = calls.watched()
        await watch.read()
        node.remove(pod)
        assert [one.pod_name for one in (await watch.read()).pods] == ["stays"]
        watch.cancel()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await calls.got(pod.uid)
        assert caught.value.code() is NOT_FOUND


async def test_hint_without_a_change_makes_no_revision(node: Node) -> None:
    pod = node.add("web")
    async with node.serving() as calls:
        watch = calls.watched()
        first = await watch.read()
        for _ in range(3):
            node.publisher.hint()
            node.set(pod, True)
            await asyncio.sleep(0.02)
        node.set(pod, False)
        assert (await watch.read()).rev == first.rev + 1
        watch.cancel()


async def test_unpaired_surrogate_in_a_name_is_replaced(node: Node) -> None:
    node.add("half\ud800")
    node.add("web")
    async with node.serving() as calls:
        assert [one.pod_name for one in (await calls.listed()).pods] == ["half?", "web"]


async def test_socket_is_open_to_all_users_and_the_inner_one_to_root_only(node: Node) -> None:
    async with node.serving():
        assert stat.S_IMODE(node.path.stat().st_mode) == 0o666
        assert stat.S_IMODE(node.path.parent.stat().st_mode) == 0o755
        assert stat.S_IMODE((node.directory / "in").stat().st_mode) == 0o700
    assert not node.path.exists()


def test_three_responses_have_the_same_field_numbers() -> None:
    everything = podinfo_pb2.ListPodConditionsResponse(
        instance_id=7, rev=8, pods=[podinfo_pb2.PodConditions(pod_uid="u")]
    )
    content = everything.SerializeToString()
    watched = podinfo_pb2.WatchPodConditionsResponse.FromString(content)
    assert (watched.instance_id, watched.rev, watched.pods[0].pod_uid) == (7, 8, "u")
    got = podinfo_pb2.GetPodConditionsResponse.FromString(content)
    assert (got.instance_id, got.rev, got.pod.pod_uid) == (7, 8, "u")


async def test_start_that_is_cancelled_leaves_no_socket(node: Node) -> None:
    running = asyncio.create_task(node.server.run())
    for _ in range(10_000):
        if node.path.exists():
            break
        await asyncio.sleep(0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert not node.path.exists()


def test_names_and_numbers_that_need_no_protobuf_are_those_of_the_definition() -> None:
    service = podinfo_pb2.DESCRIPTOR.services_by_name["PodInfo"]
    assert service.full_name == PODINFO
    assert {method.name for method in service.methods} == {LIST, WATCH, GET}
    sources = {"PODGATE": merge.PODGATE, "KUBELET": merge.KUBELET, "API": merge.API}
    expected = {"UNSPECIFIED": 0, "OWNER": merge.OWNER, **sources}
    found = {key.removeprefix("CONDITION_SOURCE_"): number for key, number in _sources()}
    assert found == expected


def _sources() -> list[tuple[str, int]]:
    return list(podinfo_pb2.ConditionSource.items())
