"""`podgate demo`: the whole job on one machine, in namespaces that end with it."""
