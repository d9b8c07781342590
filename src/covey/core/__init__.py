"""Pure tensor mathematics: advantages, ratios, surrogates, KL, aggregation, schedules. Imports torch only."""
