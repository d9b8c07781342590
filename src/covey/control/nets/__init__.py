"""Networks of actors and critics: a multilayer perceptron and the running scale of observations."""
