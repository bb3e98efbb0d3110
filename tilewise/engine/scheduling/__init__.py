"""Which sequences run next, and what the results of a step do to them; no torch."""
