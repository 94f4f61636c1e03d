"""Worker groups: how many a run has, how they start and end, and why they died."""
