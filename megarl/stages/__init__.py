"""Training stages: one module per stage, with its loop and the `run` that builds it on a rank."""
