"""Memory prediction before a run: the `dimensions` of a model and the `estimate` of the peak."""
