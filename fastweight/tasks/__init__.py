"""Synthetic tasks: each module holds a generator, its tokens and its scorer."""
