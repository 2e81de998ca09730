"""Service endpoints: which endpoints of each service this node uses."""
