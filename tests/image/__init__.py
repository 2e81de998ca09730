"""podgate as a cluster runs it: its image, and the pod that its DaemonSet describes."""
