"""An API server beside the kubelet's pods API."""

from tests.agent.kube.conftest import api, kubeconfig, listening, server

__all__ = ["api", "kubeconfig", "listening", "server"]
