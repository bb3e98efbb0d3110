"""Training steps to measure: transformers' own models, and ours."""
