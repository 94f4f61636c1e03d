"""A trial that prints on which machine each of its ranks is, and from where it has its code and data."""

from __future__ import annotations

import socket
from pathlib import Path

from model_def import DigitsTrial

from dray import pytorch


class Spread(DigitsTrial):
    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        super().__init__(context)
        here = Path(__file__).parent
        print(f"on {socket.gethostname()}: {here} has", (here / "words.txt").read_text())
