"""The pictures of dashboards: a real agent, scraped by Prometheus, whose answers are drawn."""
