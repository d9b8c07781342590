"""Environments: registration by name, copies that step together, spaces as plain arrays, manual resets."""
