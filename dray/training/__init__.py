"""The training loop and its executor. Import the modules by name: `loop`, `plan` and `progress` need no torch."""
