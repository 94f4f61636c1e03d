"""The training loop and what performs it. Import the parts by name: `loop`, `plan` and `progress` need no torch."""
