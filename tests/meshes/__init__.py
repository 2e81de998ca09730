"""podgate beside real service meshes: their own rules and proxies, taken from a folder."""
