"""Recipes: TOML files that name a run, and the code that builds its parts and carries it through."""
