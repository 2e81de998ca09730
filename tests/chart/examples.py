"""Values that the chart is tested with: by our renderer, by Helm, and by an API server."""

from typing import Any

# Authorities of a proxy that ends TLS.
_EXTRAS = {
    "extraEnv": [
        {"name": "HTTPS_PROXY", "value": "http://198.18.0.9:3128"},
        {"name": "SSL_CERT_FILE", "value": "/etc/authorities/ca.crt"},
    ],
    "extraVolumes": [{"name": "authorities", "configMap": {"name": "authorities"}}],
    "extraVolumeMounts": [
        {"name": "authorities", "mountPath": "/etc/authorities", "readOnly": True}
    ],
    "logLevel": "warning",
}

VALUES: dict[str, dict[str, Any]] = {
    "default": {},
    "enforce-only": {"enforceOnly": True},
    "air-gapped": {
        "image": {
            "registry": "registry.example:5000",
            "repository": "mirror/podgate",
            "digest": "sha256:" + "0123456789abcdef" * 4,
        },
        "imagePullSecrets": [{"name": "mirror"}],
    },
    "everything": {
        "mode": "enforce",
        "maxMode": "enforce",
        "clusterNetworkPolicies": {"mode": "close"},
        "policyReady": {
            "mode": "ready",
            "timeoutSeconds": 30,
            "witness": {
                "tolerations": [{"key": "sandbox", "operator": "Exists"}],
                "podLabels": {"example.org/team": "nodes"},
            },
        },
        "apiServer": {"host": "198.18.0.10", "port": 443},
        "agent": {
            "extraArgs": ["--disable-default-rules=storage"],
            "logFormat": "text",
            "kubelet": "unit:k3s.service",
            "nodeSelector": {"example.org/pool": "sandboxes"},
            "tolerations": [{"key": "sandbox", "operator": "Exists", "effect": "NoSchedule"}],
            "podAnnotations": {"example.org/note": "a: b"},
            "podLabels": {"example.org/team": "nodes"},
            "maxSurge": "5%",
        },
        "runtime": {"socket": "/run/cri-dockerd.sock"},
        "kubelet": {"directory": "/var/lib/k0s/kubelet"},
        "nri": {"enabled": False},
        "cni": {"enabled": True, "strictStart": True},
        "flows": {"file": "/var/log/podgate/flows.json"},
        "probeCertificates": {
            "directory": "/var/lib/spiffe",
            "secrets": {"shop": ["queue-client"], "bank": ["a.client", "b"]},
        },
        "controller": {
            "replicas": 3,
            "extraArgs": ["--log-format=text"],
            "nodeSelector": {"example.org/pool": "system"},
            "tolerations": [{"operator": "Exists"}],
            "podAnnotations": {"example.org/note": "x"},
            "podLabels": {"example.org/team": "nodes"},
            "webhook": {"clientAuthority": "apiservers", "clientNames": ["kube-apiserver"]},
            "networkPolicy": {"from": [{"ipBlock": {"cidr": "192.0.2.10/32"}}]},
            "podDisruptionBudget": {"maxUnavailable": "50%"},
        },
        "proxy": {
            "enabled": True,
            "backend": "ebpf",
            "podNetworks": ["198.18.0.0/16", "fd00:18::/32"],
            "nodeAddresses": ["198.19.0.0/16"],
            "serviceProxyName": "podgate",
            "metricsAddress": "127.0.0.1:10349",
            "healthzAddress": "[::]:10356",
            "extraArgs": ["--log-format=text"],
            "nodeSelector": {"example.org/pool": "sandboxes"},
            "tolerations": [{"operator": "Exists"}],
            "podAnnotations": {"example.org/note": "x"},
            "podLabels": {"example.org/team": "nodes"},
            "maxUnavailable": 1,
        },
        "guards": {"denyProbeHosts": True},
        "namespace": {"create": True},
    },
    "monitoring": {
        "metrics": {
            "port": 19652,
            "tlsSecret": "podgate-metrics-tls",
            "reader": {"name": "prometheus", "namespace": "monitoring"},
        },
        "monitoring": {
            "podMonitor": {
                "enabled": True,
                "labels": {"release": "a"},
                "interval": "30s",
                "scrapeTimeout": "20s",
                "relabelings": [{"targetLabel": "cluster", "replacement": "lab"}],
                "metricRelabelings": [
                    {
                        "sourceLabels": ["__name__"],
                        "regex": "prober_probe_duration_seconds_bucket",
                        "action": "drop",
                    }
                ],
            },
            "prometheusRule": {"enabled": True, "labels": {"release": "a"}},
            "dashboards": {"enabled": True},
        },
    },
    "extras": {
        "commonLabels": {"example.org/owner": "platform"},
        "agent": {**_EXTRAS, "updateStrategy": "OnDelete"},
        "controller": _EXTRAS,
        "proxy": {"enabled": True, **_EXTRAS},
        "hub": {"enabled": True, **_EXTRAS},
        "services": {"enabled": True, "hubs": "198.18.0.1:9653"},
    },
    "services": {
        "imagePullSecrets": [{"name": "mirror"}],
        "services": {"enabled": True, "hubs": "198.18.0.1:9653,198.18.0.2:9653", "tlsSecret": "x"},
        "hub": {
            "enabled": True,
            "replicas": 3,
            "extraArgs": ["--log-format=text"],
            "nodeSelector": {"node-role.kubernetes.io/control-plane": ""},
            "tolerations": [{"operator": "Exists"}],
        },
    },
    "policies": {"injection": {"mechanism": "policies"}},
    "flows": {
        "flows": {
            "otlp": {
                "endpoint": "https://$(HOST_IP):4318",
                "headersSecret": "flows-headers",
                "caSecret": "flows-ca",
            },
            "drops": 20,
        }
    },
    "conditions": {
        "conditions": {"domains": ["gpu.example.com", "disk.example.com"]},
        "injection": {"mechanism": "policies"},
    },
    "own certificate": {
        "injection": {"mechanism": "webhook"},
        "controller": {"webhook": {"certificate": "secret", "caBundle": "QQ=="}},
    },
    "cert-manager": {"controller": {"webhook": {"certificate": "cert-manager"}}},
    "least": {
        "metrics": {"port": 0},
        "injection": {"mechanism": "none"},
        "controller": {"enabled": False},
        "guards": {"enabled": False},
        "rbac": {"aggregate": False},
        "crds": {"install": False},
        "resourceQuota": {"enabled": False},
    },
}
