"""Runs untrusted programs, and functions under a time limit; imports nothing else of megarl."""
