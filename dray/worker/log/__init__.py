"""The output of a trial: written to its log file, with timestamps."""
