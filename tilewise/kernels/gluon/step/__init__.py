"""Products between attention, for a step of few rows."""
