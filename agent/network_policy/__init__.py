"""What the cluster's NetworkPolicies mean for one pod. podgate reads them and enforces none."""
