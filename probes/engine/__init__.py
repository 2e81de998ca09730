"""Running probes: one by one, on schedule, and what the results come to."""
