"""Who is let in by HostAccessPolicies: the API's shapes, where they come from, what gates get."""
