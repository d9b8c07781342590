"""Pure tensor mathematics, on torch alone: baselines, returns, ratios, policy losses, KL, loss weights, schedules."""
