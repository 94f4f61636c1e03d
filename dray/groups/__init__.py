"""Worker groups: their number, their starts and ends, and the causes of their deaths."""
