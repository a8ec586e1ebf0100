"""Model families: one file each. No torch."""
