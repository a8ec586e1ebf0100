"""Runs untrusted programs; imports nothing else of megarl."""
