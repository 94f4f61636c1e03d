"""Defaults and limits, for code that reads no config."""

MAX_SLOTS = 1_000_000  # of a trial or a token: more than any cluster has
PRIORITY = 42  # an experiment's priority on a server, as in Determined
