"""Service proxies that know nothing but what the node's localnet API tells."""
