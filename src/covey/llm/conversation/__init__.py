"""Conversations: rollouts of several turns in which a model writes and an environment answers.

encoding    text between turns -> tokens, by the model's chat template
"""
