"""What was decided, as a trace that can be replayed and drawn."""
