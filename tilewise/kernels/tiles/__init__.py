"""Tiles and splits as pure tables, one file a subject."""
