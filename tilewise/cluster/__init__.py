"""Several servers behind one address: which of them a request goes to, and how it gets there."""
