"""More than one device: shards of a model, and attention over sequences that ranks share."""
