"""An experiment's files: its directory, journal, metrics, logs and results."""
