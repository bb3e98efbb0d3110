"""Clients, network, server, engine and ranks on one clock, by one seed; see `world`."""
