"""The forward pass of dense and packed attention on Hopper."""
