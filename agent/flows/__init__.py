"""Flows out: records of dropped and admitted flows for other programs, with loss counted."""
