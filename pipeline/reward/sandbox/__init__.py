"""The sandbox: runs the code in a response isolated from the machine, and scores it by tests (`rule.compute_score`)."""
