"""Calls between the processes of a run: connections, encoding, and the event loop that takes the calls."""
