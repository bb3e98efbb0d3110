"""From requests to tokens: scheduling, one model step at a time, sampling, text."""
