"""Isolates trials that share a process from one another."""
