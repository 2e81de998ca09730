"""`podgate demo`: all modes on one machine, in namespaces that are removed with it."""
