"""The same for layers of several groups, each with a table of its own."""
