"""The kernel's and the system's service tables: IPVS over netlink, the commands of iptables."""
