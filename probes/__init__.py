"""Probes, and how they run from inside a pod's network namespace.

Independent of Kubernetes' API, of sandboxes and of eBPF. `netns` creates sockets in a pod;
`protocols` has the protocols without I/O (http1, h2c, http2, grpc_health, tcp, tls), httpGet's
semantics, and `dialing`, which moves their bytes; `spec` reads what to probe; `engine` runs one
probe (prober), decides when probes run and what results count (workers), and runs all of them on
one event loop (scheduler).
"""
