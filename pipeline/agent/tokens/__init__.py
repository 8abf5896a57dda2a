"""Tokens of episodes: prompts by the model's chat template, the tokens between two answers, and reading of answers."""
