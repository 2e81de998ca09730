"""The agent as a whole: composition, start-up, hand-over, reconciler, reports and HTTP."""
