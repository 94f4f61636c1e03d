"""The experiment config: parsed once into frozen values, or refused with all its faults at once."""
