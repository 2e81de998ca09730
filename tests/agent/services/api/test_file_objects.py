"""Services from files: what is read, what is rejected, and what stays."""

import asyncio
import contextlib
import json
import pathlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
import structlog.testing
import yaml
from google.protobuf import json_format

from agent.logs import Event
from agent.services.api import documents, file_objects
from agent.services.api.file_objects import FileObjects
from agent.services.api.object_source import SourcePosition
from agent.services.api.objects import ApiService, EndpointSlice
from tests import polling
from tests.agent.services.api import making
from tests.agent.services.api.making import Json, endpoint_json, service_json, slice_json
from tests.agent.services.api.test_decode import message

_WAIT_SECONDS = 30.0


def service(name: str = "web", **spec: Any) -> Json:
    return {"apiVersion": "v1", "kind": "Service", **service_json(name, **spec)}


def endpoint_slice(*endpoints: Json, **more: Any) -> Json:
    head = {"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice"}
    return {**head, **slice_json(*endpoints, **more)}


def kubernetes_list(*items: Json) -> Json:
    return {"apiVersion": "v1", "kind": "List", "items": [*items]}


def write(path: pathlib.Path, *found: object) -> None:
    """Replace a file in one step."""
    unfinished = path.with_name(f".{path.name}")
    # Without aliases for what the objects of a test share.
    documents = json.loads(json.dumps(found))
    unfinished.write_text(yaml.safe_dump_all(documents), encoding="utf-8")
    unfinished.rename(path)


class Followed:
    """A source of a path, and what it has reported."""

    def __init__(self, path: pathlib.Path) -> None:
        self.reported: list[str] = []
        self.source = FileObjects(path, on_service=self._on_change, on_slice=self._on_change)

    def _on_change(
        self, old: ApiService | EndpointSlice | None, new: ApiService | EndpointSlice | None
    ) -> None:
        found = new or old
        assert found is not None
        sign = "-" if new is None else "+" if old is None else "="
        self.reported.append(f"{sign}{found.metadata.name}")

    @property
    def names(self) -> list[str]:
        return sorted(name for _, name in self.source.services)

    @property
    def problem(self) -> str:
        return "; ".join(self.source.problems.values())

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["Followed"]:
        task = asyncio.create_task(self.source.run())
        try:
            yield self
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def synced(self) -> None:
        async with asyncio.timeout(_WAIT_SECONDS):
            await self.source.synced.wait()

    async def until_names(self, *names: str) -> None:
        await polling.until(f"services {names}", lambda: self.names == sorted(names))


async def test_what_kubectl_writes_is_read(tmp_path: pathlib.Path) -> None:
    endpoint = endpoint_json("198.19.0.1", zones=["a"], uid="u")
    path = tmp_path / "services.yaml"
    write(path, kubernetes_list(service(), endpoint_slice(endpoint)))
    async with Followed(path).running() as followed:
        await followed.synced()
    assert followed.names == ["web"]
    (found,) = followed.source.slices.values()
    assert found.service == "web"
    assert found.endpoints is not None
    assert found.endpoints[0].addresses == ("198.19.0.1",)
    assert followed.reported == ["+web-1", "+web"]


@pytest.mark.parametrize("kind", ["documents", "json", "typed list"])
async def test_other_forms_of_the_objects_are_read(tmp_path: pathlib.Path, kind: str) -> None:
    path = tmp_path / ("services.json" if kind == "json" else "services.yaml")
    if kind == "json":
        path.write_text(json.dumps(kubernetes_list(service())), encoding="utf-8")
    elif kind == "documents":
        write(path, service(), endpoint_slice(endpoint_json("198.19.0.1")))
    else:
        # As the API itself responds: items without a kind.
        write(path, {"apiVersion": "v1", "kind": "ServiceList", "items": [service_json()]})
    async with Followed(path).running() as followed:
        await followed.synced()
        assert followed.names == ["web"]
        assert not followed.problem


async def test_all_files_of_a_directory_are_one_source(tmp_path: pathlib.Path) -> None:
    write(tmp_path / "a.yaml", service("a"))
    (tmp_path / "b.json").write_text(json.dumps(service("b")), encoding="utf-8")
    (tmp_path / "notes.txt").write_text("not read", encoding="utf-8")
    async with Followed(tmp_path).running() as followed:
        await followed.until_names("a", "b")
        write(tmp_path / "c.yaml", service("c"))
        await followed.until_names("a", "b", "c")
        (tmp_path / "b.json").unlink()
        await followed.until_names("a", "c")
        assert not followed.problem


async def test_only_what_changed_is_reported(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "services.yaml"
    write(path, service("a"), service("b"))
    async with Followed(path).running() as followed:
        await followed.until_names("a", "b")
        followed.reported.clear()
        write(path, service("a"), service("b", clusterIPs=["198.18.0.9"]), service("c"))
        await followed.until_names("a", "b", "c")
    assert sorted(followed.reported) == ["+c", "=b"]


async def test_file_that_is_written_in_place_is_read_again(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "services.yaml"
    path.write_text(yaml.safe_dump(service("a")), encoding="utf-8")
    async with Followed(path).running() as followed:
        await followed.until_names("a")
        path.write_text(yaml.safe_dump(service("b")), encoding="utf-8")
        await followed.until_names("b")


async def test_directory_that_is_replaced_as_of_a_config_map_is_read_again(
    tmp_path: pathlib.Path,
) -> None:
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "services.yaml", service(name))
    volume = tmp_path / "volume"
    volume.mkdir()
    (volume / "..data").symlink_to(tmp_path / "old")
    (volume / "services.yaml").symlink_to("..data/services.yaml")
    async with Followed(volume).running() as followed:
        await followed.until_names("old")
        (volume / "..next").symlink_to(tmp_path / "new")
        (volume / "..next").rename(volume / "..data")
        await followed.until_names("new")


WRONG: list[tuple[object, str]] = [
    ("text", "it is not an object; write a Service or an EndpointSlice"),
    ({"kind": "Pod"}, "its kind is 'Pod'; only Service and EndpointSlice are read"),
    ({"kind": ["Service"]}, "its kind is ['Service']; only Service and EndpointSlice are read"),
    ({**service("x"), "apiVersion": "v2"}, " (default/x): its apiVersion is 'v2'; write v1"),
    (
        service("x", clusterIPs=["198.18"]),
        " (default/x): clusterIPs has '198.18'; write an IP address",
    ),
    (
        service("x", type="Cluster"),
        " (default/x): type is 'Cluster'; write one of ClusterIP, NodePort, LoadBalancer, "
        "ExternalName",
    ),
    (
        service("x", ports=[{"port": 70000}]),
        " (default/x): ports[].port is 70000; write 1 to 65535",
    ),
    (
        service("x", ports=[{"port": 1, "protocol": "tcp"}]),
        " (default/x): ports[].protocol is 'tcp'; write one of TCP, UDP, SCTP",
    ),
    (
        service("x", ports="80"),
        " (default/x): Expected `array | null`, got `str` - at `$.spec.ports`; correct it",
    ),
    (
        service("x", loadBalancerSourceRanges=["all"]),
        " (default/x): loadBalancerSourceRanges has 'all'; write a network such as 198.18.0.0/15",
    ),
    (
        endpoint_slice(endpoint_json("fd00:18::1"), name="x"),
        " (default/x): endpoints[].addresses has 'fd00:18::1'; write an address of IPv4",
    ),
    (
        {**endpoint_slice(name="x"), "endpoints": [{"addresses": []}]},
        " (default/x): an endpoint has no address; add one",
    ),
    (
        {**endpoint_slice(name="x"), "addressType": "ipv4"},
        " (default/x): addressType is 'ipv4'; write IPv4 or IPv6",
    ),
    (service(""), "metadata.name is ''; write a DNS name"),
    (service("web"), " (default/web): the file has this Service twice; remove one of the two"),
]


@pytest.mark.parametrize(("wrong", "problem"), WRONG, ids=[text for _, text in WRONG])
async def test_document_with_a_mistake_is_named_and_affects_no_other(
    tmp_path: pathlib.Path, wrong: object, problem: str
) -> None:
    path = tmp_path / "services.yaml"
    write(path, service("web"), wrong)
    async with Followed(path).running() as followed:
        await followed.synced()
        assert followed.names == ["web"]
        assert followed.problem.removeprefix("services.yaml, document 2").lstrip(": ") == (
            problem.strip()
        )


async def test_each_mistake_is_logged_once(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "services.yaml"
    followed = Followed(path)
    logged = []
    for found in (
        [service("a", type="x"), service("web")],
        [service("a", type="x"), service("web", type="y")],
        [service("a"), service("web", type="y")],
        [service("a", type="x"), service("web")],
    ):
        write(path, *found)
        with structlog.testing.capture_logs() as logs:
            await followed.source.refresh()
            await followed.source.refresh()
        logged.append(
            [
                one["problem"].partition(":")[0]
                for one in logs
                if one["event"] is Event.SERVICES_SOURCE_INVALID
            ]
        )
    first, second = (
        f"services.yaml, document {number} (default/{name})"
        for number, name in ((1, "a"), (2, "web"))
    )
    assert logged == [[first], [second], [], [first]]


async def test_item_of_a_list_with_a_mistake_is_named(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "services.yaml"
    write(path, kubernetes_list(service("a"), service("b", type="")))
    async with Followed(path).running() as followed:
        await followed.synced()
        assert followed.problem.startswith("services.yaml, item 2 (default/b): type is ''")


async def test_document_that_becomes_invalid_keeps_its_last_version(
    tmp_path: pathlib.Path,
) -> None:
    path = tmp_path / "services.yaml"
    write(path, service("a"), service("b"))
    async with Followed(path).running() as followed:
        await followed.until_names("a", "b")
        write(path, service("a", clusterIPs=["none"]), service("c"))
        await followed.until_names("a", "c")
        assert followed.source.services["default", "a"].spec.cluster_ips == ("198.18.0.1",)
        assert "clusterIPs has 'none'" in followed.problem
        write(path, service("c"))
        await followed.until_names("c")
        assert not followed.problem


@pytest.mark.parametrize("content", ["{", "a: &b 1", "\0"])
async def test_unreadable_file_keeps_its_services(tmp_path: pathlib.Path, content: str) -> None:
    write(tmp_path / "a.yaml", service("a"))
    write(tmp_path / "b.yaml", service("b"))
    async with Followed(tmp_path).running() as followed:
        await followed.until_names("a", "b")
        (tmp_path / "a.yaml").write_text(content, encoding="utf-8")
        await polling.until("the problem", lambda: followed.problem)
        assert "a.yaml" in followed.problem
        assert followed.problem.endswith("its last known services stay")
        write(tmp_path / "b.yaml", service("c"))
        await followed.until_names("a", "c")


async def test_missing_file_keeps_all_services_until_it_is_back(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "directory" / "services.yaml"
    path.parent.mkdir()
    write(path, service("a"))
    async with Followed(path).running() as followed:
        await followed.until_names("a")
        path.unlink()
        await polling.until("the problem", lambda: "does not exist" in followed.problem)
        assert followed.names == ["a"]
        write(path, service("b"))
        await followed.until_names("b")
        assert not followed.problem


async def test_nothing_is_synced_before_the_source_exists(tmp_path: pathlib.Path) -> None:
    directory = tmp_path / "later"
    async with Followed(directory).running() as followed:
        await polling.until("the problem", lambda: followed.problem)
        assert not followed.source.synced.is_set()
        directory.mkdir()
        await followed.synced()
        write(directory / "a.yaml", service("a"))
        await followed.until_names("a")


async def test_object_in_two_files_is_reported(tmp_path: pathlib.Path) -> None:
    write(tmp_path / "a.yaml", service("web"))
    write(tmp_path / "b.yaml", service("web", clusterIPs=["198.18.0.2"]))
    async with Followed(tmp_path).running() as followed:
        await followed.synced()
        assert followed.problem == ("Service default/web is in two files; remove one of the two")
        assert followed.source.services["default", "web"].spec.cluster_ips == ("198.18.0.1",)


async def test_restart_keeps_what_is_invalid_now(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "services.yaml"
    write(path, service("a"), service("b"))
    async with Followed(path).running() as before:
        await before.synced()
    write(path, service("a"), service("b", type="x"))
    after = Followed(path)
    after.source.seed(
        list(before.source.services.values()), list(before.source.slices.values()), SourcePosition()
    )
    async with after.running():
        await after.synced()
        assert (after.names, after.reported) == (["a", "b"], [])


async def test_restart_with_an_unreadable_file_waits_for_it(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "services.yaml"
    path.write_text("{", encoding="utf-8")
    async with Followed(path).running() as followed:
        await polling.until("the problem", lambda: followed.problem)
        assert not followed.source.synced.is_set()
        write(path, service("a"))
        await followed.synced()
        assert followed.names == ["a"]


def as_message(name: str, **changes: Any) -> Json:
    """As `podgate services --all` writes it."""
    slices = [making.endpoint_slice(endpoint_json("198.19.0.1"), service=name)]
    return {**json_format.MessageToDict(message(making.service(name), slices)), **changes}


async def test_service_of_podgate_that_becomes_invalid_stays_with_its_slices(
    tmp_path: pathlib.Path,
) -> None:
    path = tmp_path / "services.yaml"
    write(path, as_message("a"), as_message("b"), endpoint_slice(name="c"))
    followed = Followed(path)
    await followed.source.refresh()
    assert list(map(str, followed.source.slices)) == [
        "('default', 'a-0-ipv4-8080-1')",
        "('default', 'b-0-ipv4-8080-1')",
        "('default', 'c')",
    ]
    followed.reported.clear()
    write(path, as_message("a", clusterIps=["none"]))
    for _ in range(2):
        await followed.source.refresh()
        assert followed.names == ["a"]
        assert sorted(followed.reported) == ["-b", "-b-0-ipv4-8080-1", "-c"]
        assert followed.problem == (
            "services.yaml (default/a): clusterIPs has 'none'; write an IP address"
        )


async def test_document_without_a_name_may_be_any_that_was_there(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "services.yaml"
    write(path, service("a"), endpoint_slice(name="b"), service("c"))
    followed = Followed(path)
    await followed.source.refresh()
    followed.reported.clear()
    write(path, "text", service("c", type="NodePort"))
    await followed.source.refresh()
    assert (followed.names, followed.reported) == (["a", "c"], ["=c"])
    assert list(followed.source.slices) == [("default", "b")]


@pytest.mark.parametrize("kind", ["Service", "EndpointSlice"])
async def test_kept_object_is_of_the_kind_that_was_rejected(
    tmp_path: pathlib.Path, kind: str
) -> None:
    path = tmp_path / "services.yaml"
    write(path, service("same"), endpoint_slice(name="same", service="same"))
    followed = Followed(path)
    await followed.source.refresh()
    write(path, {"kind": kind, "metadata": {"name": "same"}})
    await followed.source.refresh()
    assert (len(followed.source.services), len(followed.source.slices)) == (
        (1, 0) if kind == "Service" else (0, 1)
    )


async def test_kept_version_gives_way_to_another_file(tmp_path: pathlib.Path) -> None:
    write(tmp_path / "a.yaml", service("web"), endpoint_slice(name="s"))
    followed = Followed(tmp_path)
    await followed.source.refresh()
    write(tmp_path / "a.yaml", service("web", type="x"), {**endpoint_slice(name="s"), "ports": 1})
    second = endpoint_slice(endpoint_json("198.19.0.9"), name="s")
    write(tmp_path / "b.yaml", service("web", type="NodePort"), second)
    followed.reported.clear()
    await followed.source.refresh()
    assert followed.source.services["default", "web"].spec.type == "NodePort"
    assert followed.reported == ["=s", "=web"]
    (tmp_path / "b.yaml").unlink()
    await followed.source.refresh()
    assert followed.source.services["default", "web"].spec.type == "ClusterIP"
    assert followed.reported == ["=s", "=web"] * 2


async def test_of_two_files_with_one_object_the_first_stays(tmp_path: pathlib.Path) -> None:
    write(tmp_path / "b.yaml", service("web"), endpoint_slice(name="s"))
    followed = Followed(tmp_path)
    await followed.source.refresh()
    followed.reported.clear()
    other = endpoint_slice(endpoint_json("198.19.0.9"), name="s")
    write(tmp_path / "a.yaml", service("web", type="NodePort"), other)
    await followed.source.refresh()
    assert followed.reported == []
    assert followed.source.problems == {
        str(tmp_path): (
            "Service default/web is in two files; remove one of the two (1 more problems)"
        )
    }
    write(tmp_path / "a.yaml", other)
    await followed.source.refresh()
    assert followed.problem == ("EndpointSlice default/s is in two files; remove one of the two")


async def test_unreadable_file_keeps_what_it_had_through_further_mistakes(
    tmp_path: pathlib.Path,
) -> None:
    path = tmp_path / "services.yaml"
    write(path, service("a"), service("b"))
    followed = Followed(path)
    await followed.source.refresh()
    followed.reported.clear()
    for content in ("{", "{{"):
        path.write_text(content, encoding="utf-8")
        await followed.source.refresh()
    write(path, service("a", type="x"))
    await followed.source.refresh()
    assert (followed.names, followed.reported) == (["a"], ["-b"])


async def test_directory_of_unreadable_files_is_not_read_before_one_is(
    tmp_path: pathlib.Path,
) -> None:
    for name in ("a.yaml", "b.yaml"):
        (tmp_path / name).write_text("{", encoding="utf-8")
    followed = Followed(tmp_path)
    await followed.source.refresh()
    assert not followed.source.synced.is_set()
    assert followed.problem.endswith("its last known services stay")
    write(tmp_path / "b.yaml", service("b"))
    await followed.source.refresh()
    assert followed.source.synced.is_set()
    assert (followed.names, "a.yaml" in followed.problem) == (["b"], True)


async def test_empty_directory_has_no_services(tmp_path: pathlib.Path) -> None:
    followed = Followed(tmp_path)
    await followed.source.refresh()
    assert followed.source.synced.is_set()
    assert (followed.names, followed.source.problems) == ([], {})


@pytest.mark.parametrize("is_file", [False, True])
async def test_source_that_does_not_exist_is_one_sentence(
    tmp_path: pathlib.Path, *, is_file: bool
) -> None:
    if is_file:
        path = tmp_path / "services.yaml"
        problem = f"{path} does not exist; create it"
    else:
        path = tmp_path / "none" / "services"
        problem = f"{path.parent} cannot be read (No such file or directory); create it"
    followed = Followed(path)
    await followed.source.refresh()
    assert followed.source.problems == {str(path): problem}
    assert not followed.source.synced.is_set()


async def test_node_without_inotify_looks_for_changes_regularly(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(**_: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(file_objects, "DirectoryWatches", fail)
    monkeypatch.setattr(file_objects, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(file_objects, "_RESYNC_SECONDS", 3600.0)
    path = tmp_path / "services.yaml"
    write(path, service("a"))
    async with Followed(path).running() as followed:
        await followed.until_names("a")
        write(path, service("b"))
        await followed.until_names("b")


async def test_target_of_a_link_that_inotify_does_not_report_is_read_later(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_objects, "_POLL_SECONDS", 3600.0)
    monkeypatch.setattr(file_objects, "_RESYNC_SECONDS", 0.01)
    for name in ("link", "target"):
        (tmp_path / name).mkdir()
    target = tmp_path / "target" / "services.yaml"
    write(target, service("a"))
    link = tmp_path / "link" / "services.yaml"
    link.symlink_to(target)
    async with Followed(link).running() as followed:
        await followed.until_names("a")
        write(target, service("b"))
        await followed.until_names("b")


def test_service_with_its_slices_is_added_once() -> None:
    content = documents.FileContent()
    service = making.service("web")
    slices = [making.endpoint_slice(name=name) for name in ("a", "b")]
    content.add(service, slices)
    assert [one.metadata.name for one in content.slices.values()] == ["a", "b"]
    with pytest.raises(documents._InvalidError):
        content.add(service)
    with pytest.raises(documents._InvalidError):
        content.add(making.service("db"), slices[:1])
