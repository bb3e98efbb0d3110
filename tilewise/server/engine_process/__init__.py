"""The engine in a process of its own: `remote` is the server's side, `host` the engine's."""
