"""A pod that the user names: NAME or NAMESPACE/NAME."""

import argparse

from agent.operate.kubectl.cluster import Cluster, KubectlError, Object


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("pod", metavar="POD", help="Its name, or namespace/name.")
    parser.add_argument("--namespace", "-n", help="Its namespace (default: the context's).")


def get(cluster: Cluster, name: str, namespace: str | None) -> Object:
    """Raises `KubectlError`, also if there is no such pod."""
    prefix, slash, short = name.rpartition("/")
    if slash and namespace and prefix != namespace:
        raise KubectlError(f"{name} is in namespace {prefix}, and not in {namespace}")
    place = [f"--namespace={found}"] if (found := prefix or namespace) else []
    return cluster.get("pod", short, *place)


def full_name(pod: Object) -> str:
    return f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"


def node_of(pod: Object) -> str:
    """Raises `KubectlError` while it has none."""
    node: str = pod["spec"].get("nodeName", "")
    if not node:
        raise KubectlError(
            f"pod {full_name(pod)} has no node yet; see 'kubectl podgate why-not-ready'"
        )
    return node
