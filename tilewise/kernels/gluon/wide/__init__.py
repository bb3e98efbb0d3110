"""The forward pass of attention on Hopper in heads of more than 256 channels."""
