"""The relay: carries the kubelet's connections into pods' namespaces. A process of its own."""
