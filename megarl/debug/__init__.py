"""Finds where two computations of the same batch first differ."""
