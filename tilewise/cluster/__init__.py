"""Several servers behind one address: choosing a server for a request, and forwarding the
request."""
