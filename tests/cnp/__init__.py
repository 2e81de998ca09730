"""Conformance of node traffic with ClusterNetworkPolicies: cases as data, a lab and a cluster."""
