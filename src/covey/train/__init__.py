"""The training step, in this order: loop -> collect -> prepare -> update."""
