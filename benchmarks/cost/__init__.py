"""What it costs: scoring.py (the scores, beside other ways to compute them), throughput.py (whole rounds of the scripts)."""
