"""Runs untrusted programs, and functions under a time limit. Imports no other megarl package."""
