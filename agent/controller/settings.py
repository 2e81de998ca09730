"""Settings of `podgate controller`. Each field documents the reason for its default."""

import msgspec

from agent.logs import LogFormat


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

    webhook_host: str = ""
    """Address of the webhook. Empty: all, since the API server connects to the pod's."""

    webhook_port: int = 9443
    """Unprivileged; deploy/manifests' Service has the same."""

    log_format: LogFormat = LogFormat.JSON
    """JSON, which log collectors read."""
