"""Dropped traffic: the source processes in total, and single drops as they happen."""
