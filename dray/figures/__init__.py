"""What figures of an experiment show, as plain data: for the page of `dray serve`, its API, and the report."""
