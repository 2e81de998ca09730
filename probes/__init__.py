"""What a probe is, and how it is run from inside a pod's network namespace.

Knows nothing of Kubernetes' API, of sandboxes or of eBPF. From the bottom up:
`netns` makes sockets in a pod; `http1`, `h2c`, `http2`, `grpc_health`, `tcp`
and `tls` are protocols without I/O, `http_get` their meaning for httpGet;
`dialing` carries their bytes, `prober` makes one probe of it; `specs` reads
what to probe, `workers` decides when and what results come to, and
`scheduler` runs all of that on one event loop.
"""
