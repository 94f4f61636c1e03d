"""The fixtures of tests/pytorch."""

from tests.pytorch.conftest import backend, fit, host

__all__ = ["backend", "fit", "host"]
