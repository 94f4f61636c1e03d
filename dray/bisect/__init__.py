"""Finds the commit after which a metric is worse: for ``dray bisect``."""
