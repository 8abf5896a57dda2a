"""Tokens of episodes: prompts by the model's chat template, the tokens between two turns, and parsing of turns."""
