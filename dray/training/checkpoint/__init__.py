"""The contents of checkpoints: copying, writing and reading them."""
