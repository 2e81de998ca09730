"""The admin API: the reports that the agent serves, and their client."""
