"""The loops of each stage: one screen each, over roles."""
