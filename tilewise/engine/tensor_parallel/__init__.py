"""One scheduler, N worker processes, each with a shard of the model and of every cache block."""
