"""Worker groups that are lent to trials: the desk, the groups, the Tune handle, the worker's side of a lease."""
