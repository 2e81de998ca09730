"""The kubelet: its identity, the ports to which gates admit it, and its pods API."""
