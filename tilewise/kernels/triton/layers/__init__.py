"""A decode step's layers in one kernel: `launch` makes and runs it, `kernel` is it."""
