"""Sweeps: many trials of one config, anywhere, whose results do not depend on who was stopped."""
