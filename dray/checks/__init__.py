"""Checks of a cluster before anything trains there: ``dray cluster check`` and ``dray cluster validate``."""
