"""What people read and call: the command line, the kubectl plugin, checks, pages and alerts."""
