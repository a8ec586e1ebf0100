"""Nothing either: see transformer_engine."""

from transformer_engine import __getattr__  # noqa: F401
