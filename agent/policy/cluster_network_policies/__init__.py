"""ClusterNetworkPolicies, and what they mean for node traffic."""
