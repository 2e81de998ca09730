"""The kernel's interfaces: netlink, cgroups, procfs, nftables and raw packets."""
