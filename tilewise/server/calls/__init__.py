"""How models write calls of tools: one table of formats, and what reads, writes and bounds them."""
