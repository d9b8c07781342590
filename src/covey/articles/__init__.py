"""The classes that articles on GRPO and PPO describe, as thin facades over the same parts that `covey.run` uses.

`from covey import GRPOLoss, GRPOTrainer, PPOLoss, PPOTrainer, compute_gae`; docs/articles.md shows each
of them at work.
"""
