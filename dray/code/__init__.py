"""The user's model directory: which files are code, how they reach the workers, and how they are imported."""
