"""The experiment config: parsed once into frozen values, or rejected with all its faults at once."""
