"""One scheduler, N worker processes that each hold a shard of the model and of every cache block."""
