"""What an experiment leaves on disk: its directory, journal, metrics, logs and results."""
