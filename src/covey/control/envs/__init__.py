"""Environments: lookup by id, vector environments with manual resets, space adapters, rendering."""
