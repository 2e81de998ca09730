"""Mode strict: relays, how they connect to the host, and their targets."""
