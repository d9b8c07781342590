"""covey: reinforcement learning by comparing each attempt with its siblings, or with a critic."""
