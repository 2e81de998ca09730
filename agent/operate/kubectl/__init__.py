"""`kubectl podgate`, the plugin for operators: the standard library and `kubectl` suffice.

deploy/plugin.py packs it into one executable file.
"""
