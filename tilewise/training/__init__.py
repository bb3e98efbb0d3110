"""Train decoders and encoders on packed documents: text, batches, losses, steps, checkpoints."""
