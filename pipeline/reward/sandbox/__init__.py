"""The sandbox: it runs the code of a response isolated from everything else, and scores it by tests
(`rule.compute_score`)."""
