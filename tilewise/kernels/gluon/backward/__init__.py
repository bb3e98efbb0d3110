"""The backward pass of dense and packed attention on Hopper."""
