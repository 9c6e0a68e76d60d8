"""Does filtering do what the paper says, and what would a sceptic ask? Begin with suites.py: SUITES is the table of all runs.

suites.py              each suite: what it asks, its runs, and how its page shows them
metrics.py             what is measured on curves and over seeds
pages.py               the tables and pictures of a suite's page
paper.py               the paper's own numbers
summary.py             the tables of the two READMEs
rlhf.py, rlhf_kl.py, rlhf_grpo.py, rlhf_controller.py    the suites of the language model
rlhf_tiny.py           the small models and texts that are the defaults of ppo_iif_rlhf.py
fixed_reference.py, learning.py    two experiments with a command of their own
"""
