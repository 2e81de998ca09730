"""Alerts and dashboards, as data; `make docs` writes deploy/monitoring from them."""
