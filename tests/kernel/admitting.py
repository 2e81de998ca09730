"""A policy that admits a test's own process."""

_POLICY = """
apiVersion: policy.podgate.io/v1alpha1
kind: HostAccessPolicy
metadata: {{name: admits-the-test}}
spec:
  pods: {{namespaces: [demo]}}
  from: [{{cgroup: {{path: {path}}}}}]
  ports: [{{protocol: {protocol}, port: {port}}}]
"""


def policy(path: str, port: int, protocol: str = "TCP") -> str:
    """Of the cgroup with this path, to pods of namespace demo."""
    return _POLICY.format(path=path, port=port, protocol=protocol)
