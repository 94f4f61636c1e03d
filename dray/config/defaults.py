"""Defaults for code that reads no config."""

PRIORITY = 42  # an experiment's priority on a server, as in Determined
