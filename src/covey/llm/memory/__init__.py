"""Memory predicted before a run: `dimensions` of a model, `estimate` of the peak."""
