"""The fixtures of tests/pytorch."""

from tests.pytorch.conftest import fit, host

__all__ = ["fit", "host"]
