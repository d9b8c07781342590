"""Supervised fine-tuning: sources of examples, and their tokens."""
