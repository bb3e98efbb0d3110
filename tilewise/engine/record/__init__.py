"""The engine's decisions, as a trace that can be replayed and drawn."""
