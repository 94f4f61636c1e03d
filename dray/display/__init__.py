"""What a run shows at a terminal, in a notebook or in a file."""
