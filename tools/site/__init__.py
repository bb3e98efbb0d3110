"""What builds the site of `docs/`: generated pages, notebooks as pages, hooks of mkdocs."""
