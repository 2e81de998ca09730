"""What `kubectl podgate verify` does: canary pods, tries of host processes, and a report."""
