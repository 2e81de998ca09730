"""Client of service endpoints: which endpoints of each service this node uses.

Needs grpcio and protobuf only. A complete program:

    from podgate_client import services

    services.run(lambda state: print(state.rev, len(state.services)))
"""

import argparse
from collections.abc import Callable, Sequence
from typing import Any, Unpack

import grpc

from agent.client import aio, base

from .service_states import FAMILIES, SUBJECT, TYPES, ServicesSession, ServicesState
from .v1alpha1 import endpoints_pb2

__all__ = [
    "FAMILIES",
    "TYPES",
    "AsyncServicesClient",
    "ServicesClient",
    "ServicesState",
    "run",
]

DEFAULT_TARGET = "unix:///run/podgate/localnet/localnet.sock"
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
DEADLINE_EXCEEDED = grpc.StatusCode.DEADLINE_EXCEEDED
REJECTED = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNIMPLEMENTED,
)
"""The message names what to change in the request, or that the server is too old for it."""
METHOD = "/podgate.localnet.v1alpha1.Endpoints/Next"

API = base.Api[ServicesState](
    subject=SUBJECT,
    default_target=DEFAULT_TARGET,
    method=METHOD,
    response=endpoints_pb2.NextItem,
    session=ServicesSession,
    is_followed=False,
)


class ServicesClient(base.StreamClient[ServicesState]):
    """Receives each new state, whole. `cancel` may be called from any thread, the rest from one."""

    API = API

    def __init__(
        self,
        target: str = "",
        *,
        filter: endpoints_pb2.NextFilter | None = None,
        accepts_delta: bool = True,
        **options: Unpack[base.ClientOptions],
    ) -> None:
        """filter: what to receive, all that a proxy needs if None; its position is not used.
        accepts_delta: whether the server may send differences, which the client applies.
        options: as `base.StreamClient`."""
        session = ServicesSession(filter, accepts_delta=accepts_delta)
        super().__init__(target, session=session, **options)


class AsyncServicesClient(aio.AsyncStreamClient[ServicesState]):
    """Receives each new state, whole, on the event loop that creates it."""

    API = API

    def __init__(
        self,
        target: str = "",
        *,
        filter: endpoints_pb2.NextFilter | None = None,
        accepts_delta: bool = True,
        **options: Unpack[base.ClientOptions],
    ) -> None:
        """As `ServicesClient`."""
        session = ServicesSession(filter, accepts_delta=accepts_delta)
        super().__init__(target, session=session, **options)


def run(handler: Callable[[ServicesState], object], arguments: Sequence[str] | None = None) -> None:
    """Call `handler` with each new state until SIGINT or SIGTERM, with the options of the command
    line. arguments: the process' own if None."""
    parser = base.parser_of(API)
    _add_filter(parser)
    base.run(_client, handler, parser, arguments)


def _add_filter(parser: argparse.ArgumentParser) -> None:
    """Options by the names of NextFilter's fields."""
    choices = {"types": list(TYPES), "families": list(FAMILIES)}
    for option, field, help_text in (
        ("--namespace", "namespaces", "only services of it"),
        ("--type", "types", "only services of it; ExternalName services only with it"),
        ("--family", "families", "only addresses of it"),
        ("--labels", "label_patterns", "receive labels with this key; * matches any part of a key"),
        ("--annotations", "annotation_patterns", "the same for annotations"),
    ):
        parser.add_argument(
            option,
            dest=field,
            action="append",
            default=[],
            choices=choices.get(field),
            metavar=None if field in choices else "TEXT",
            help=f"{help_text}; may be repeated",
        )
    parser.add_argument(
        "--service-proxy-name",
        default="",
        metavar="NAME",
        help="only services that this proxy is to serve; *: all",
    )
    for option, help_text in (
        ("--all-endpoints", "also receive endpoints that this node does not use"),
        ("--endpoint-details", "receive node, zone, pod, conditions and hints of endpoints"),
    ):
        parser.add_argument(option, action="store_true", help=help_text)
    parser.add_argument("--node", default="", help="another node's view, of a server for it")


def _client(
    *,
    target: str,
    instance_id: int,
    rev: int,
    error_delay_seconds: float,
    on_problem: Callable[[str], None],
    types: Sequence[str],
    families: Sequence[str],
    **fields: Any,
) -> ServicesClient:
    found = endpoints_pb2.NextFilter(
        types=[TYPES[one] for one in types], families=[FAMILIES[one] for one in families], **fields
    )
    return ServicesClient(
        target,
        filter=found,
        instance_id=instance_id,
        rev=rev,
        error_delay_seconds=error_delay_seconds,
        on_problem=on_problem,
    )
