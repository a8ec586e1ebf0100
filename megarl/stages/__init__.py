"""The training loop of each stage, written in terms of roles."""
