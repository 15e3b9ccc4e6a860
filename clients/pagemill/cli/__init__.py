"""The `pagemill` command. It starts the other programs as processes and imports none of them."""
