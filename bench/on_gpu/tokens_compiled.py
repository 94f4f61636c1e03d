"""`tokens` with both models compiled by torch.compile."""

from __future__ import annotations

import tokens


def main(tiny: bool) -> None:
    """Measure."""
    tokens.main(tiny, compiled=True)
