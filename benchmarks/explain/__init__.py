"""What a round taught the agent. Begin with `python -m benchmarks.explain RUN --round 5`; RUN is a folder in runs/.

training.py            python -m benchmarks.explain.training RUN               what one sees while it trains
records.py             python -m benchmarks.explain RUN --round 5              which records helped or hurt, and is their
                                                                               advantage wrong
behaviour.py           python -m benchmarks.explain.behaviour RUN --find       how an action at a state came about
intervene.py           python -m benchmarks.explain.intervene RUN              what dropping records in one round would have done
local_check.py         python -m benchmarks.explain.local_check RUN --round 5  how far a score predicts what dropping does
attribution.py         python -m benchmarks.explain.attribution RUN --round 5  how true each attribution method is; methods.py has them
snapshots.py           a saved round (`--snapshot-rounds`), opened: its batch, its agent, its update and its environments again
"""
