"""Service proxies, which get all their data from the node's service endpoints API."""
