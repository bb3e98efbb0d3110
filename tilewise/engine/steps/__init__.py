"""One step of the model, op by op, and what it samples."""
