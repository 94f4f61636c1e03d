"""A trial's output in its log file, with timestamps."""
