"""The nftables table that keeps pods' interfaces closed until they are gated."""
