"""A step plan in, sampled tokens out. Knows no network."""
