"""Settings of `podgate controller`. Each field documents the reason for its default."""

import pathlib

import msgspec

from agent.logs import LogFormat

WEBHOOK_PORT = 9443


class WebhookSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the admission webhook."""

    host: str = ""
    """Address. Empty: all, since the API server connects to the pod's."""

    port: int = WEBHOOK_PORT
    """Unprivileged; deploy/manifests' Service has the same."""

    directory: pathlib.Path | None = None
    """Directory with tls.crt and tls.key, where the kubelet mounts a Secret and replaces both at
    once. None: the webhook is not served."""

    client_ca: pathlib.Path | None = None
    """Authorities (PEM) of the API servers' client certificates. None: any client is served, since
    API servers present a certificate only where their operator configures one."""

    client_names: tuple[str, ...] = ()
    """Common names that clients may have. Empty: all that `client_ca` signs."""


class ControllerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one controller process, set by the command line and never changed afterwards."""

    kubeconfig: str | None = None
    """kubeconfig file. None: KUBECONFIG, or the pod's service account."""

    namespace: str = "podgate"
    """Namespace of the Lease and of podgate's own objects: that of deploy/manifests."""

    identity: str
    """Of this process in the Lease; the pod's name, and something that a restarted container does
    not share."""

    http_host: str = ""
    """Address of /metrics, /healthz and /readyz. Empty: all, since the kubelet's probes come from
    the node."""

    http_port: int = 9651
    """Beside the agent's 9650."""

    webhook: WebhookSettings = WebhookSettings()
    """Of the admission webhook."""

    log_format: LogFormat = LogFormat.JSON
    """JSON, which log collectors read."""
