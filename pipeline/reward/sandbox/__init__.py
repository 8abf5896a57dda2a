"""Runs the code of a response apart from everything else, and scores it by tests: `rule.compute_score`."""
