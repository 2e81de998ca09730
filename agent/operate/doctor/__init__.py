"""`podgate doctor`: checks of the machine, the cluster and the agent. They change nothing."""
