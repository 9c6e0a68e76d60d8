"""Does filtering do what the paper says? What is run (suites.py), what is measured on it (metrics.py), what is shown of it."""
