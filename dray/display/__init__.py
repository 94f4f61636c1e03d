"""The display of a run: at a terminal, in a notebook or in a file."""
