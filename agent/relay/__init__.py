"""The relay: a process that proxies the kubelet's connections into pods' network namespaces."""
