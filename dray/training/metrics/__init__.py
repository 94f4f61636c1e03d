"""Metrics of batches and validations: accumulated, reduced, checked and written."""
