"""HostAccessPolicies: API types, sources, and the rules that gates get."""
