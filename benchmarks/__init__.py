"""Measurements a sceptic can repeat: `python -m benchmarks --help`."""
