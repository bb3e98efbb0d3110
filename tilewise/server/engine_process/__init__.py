"""The engine in a process of its own: `remote` is the server's end, `host` the engine's."""
