"""What suites run beside the scripts of the project's root. Begin with filters.py, the shortest way to try a rule of your own.

filters.py             rules for `--filter benchmarks.variants.filters:NAME`
envs.py, envpool_highway.py    environments for `--env-id benchmarks.variants.MODULE:NAME`
dqn.py                 DQN with the filter, examples/dqn_iif.py, against plain DQN
restarted.py           ppo_iif.py, whose every round begins anew with the same random numbers
sb3_ppo.py             stable-baselines3's PPO, with the arguments and logged names of ppo_iif.py
"""
