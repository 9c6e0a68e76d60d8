"""What a saved round taught the agent: begin with `python -m benchmarks.explain RUN --round 5` (records.py)."""
