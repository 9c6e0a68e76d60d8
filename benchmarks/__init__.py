"""Measurements of the method: what scoring costs, what it is exact about, and what filtering by it does to training."""
