"""Decide which sequences run next, and apply the results of a step to them; no torch."""
