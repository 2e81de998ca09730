"""Service endpoints put together from settings, for an agent or a hub."""

import pathlib

from agent.api.tls import CurrentTls, TlsFiles
from agent.kube.client import ApiClient
from agent.services.api.api_objects import ApiObjects
from agent.services.api.file_objects import FileObjects
from agent.services.api.node_zones import NodeZones
from agent.services.api.object_source import ObjectSource, OnService, OnSlice
from agent.services.api.remote_objects import RemoteObjects
from agent.services.api.source import NodesEndpoint, ServiceEndpoints, SourceFactory
from agent.settings import ServiceSettings
from agent.state_files import StateSaver


def endpoints(
    chosen: ServiceSettings,
    *,
    node: str,
    run_directory: pathlib.Path,
    api: ApiClient | None,
    zones: NodeZones,
    saved_pods: StateSaver | None = None,
) -> ServiceEndpoints:
    """node: empty for a process that only serves others; api: None without a cluster; zones: run
    by the caller; saved_pods: saves the node's pods."""
    tls = None
    if chosen.tls:
        files = TlsFiles(chosen.tls.authorities, chosen.tls.certificate, chosen.tls.key)
        tls = CurrentTls(files)
    others = NodesEndpoint(chosen.listen, tls) if chosen.listen and tls else None
    return ServiceEndpoints(
        _source(chosen, api, tls),
        node=node,
        zones=zones,
        run_directory=run_directory,
        address=chosen.address,
        state=chosen.state,
        others=others,
        saved_pods=saved_pods,
    )


def _source(
    chosen: ServiceSettings, api: ApiClient | None, tls: CurrentTls | None
) -> SourceFactory:
    where = chosen.source

    def make(on_service: OnService, on_slice: OnSlice) -> ObjectSource:
        if isinstance(where, tuple):
            assert tls is not None  # the command line requires it
            return RemoteObjects(where, tls=tls, on_service=on_service, on_slice=on_slice)
        if where is not None:
            return FileObjects(where, on_service=on_service, on_slice=on_slice)
        assert api is not None  # the command line requires it
        return ApiObjects(api, on_service=on_service, on_slice=on_slice)

    return make
