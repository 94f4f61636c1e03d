"""One experiment: its config, its run, its results."""
