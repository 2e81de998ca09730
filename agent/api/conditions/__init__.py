"""Conditions API: conditions of pods that other agents of the node report, kept in step."""
