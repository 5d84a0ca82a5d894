"""Worlds, tasks and a sampler on the kit's public names, to run, to read and to copy; README.md lists them."""
