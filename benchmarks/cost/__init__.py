"""What it costs. Begin with `python -m benchmarks.cost.scoring --table`: the scores, beside other ways to compute them.

scoring.py             time, memory and error of the scores of one round
throughput.py          whole rounds of the training scripts, against plain_ppo.py, a loop in the shape of CleanRL's
compiling.py           whether --compile pays within a default run
scaling.py             the stages of a round as records, width and environments grow
atari.py               scoring Atari's network: modes, chunk sizes, bfloat16
environments.py        Atari's environments: one after the other, in processes, in envpool
cleanrl.py             CleanRL's own scripts, run under today's Gymnasium, for throughput.py
rlhf_memory.py         the memory of ppo_iif_rlhf.py, predicted and measured
"""
