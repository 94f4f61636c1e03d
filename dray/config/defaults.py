"""Defaults that are also needed where no config is read."""

PRIORITY = 42  # of an experiment on a server; Determined's
