"""Pods, attackers and a kubelet in namespaces of their own, for the demo and the tests."""
