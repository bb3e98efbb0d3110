"""Measurements: one way to time, measured ceilings, peers in the same run. Not tests."""
