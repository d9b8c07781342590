"""GRPOTrainer and PPOTrainer, as articles on GRPO and PPO describe them, over the parts that `covey.run` uses.

docs/articles.md shows each of them at work; their losses are in `covey.functional`.
"""
