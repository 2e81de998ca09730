"""The gates of pods: attaching, order in the chain, and tests of their path."""
