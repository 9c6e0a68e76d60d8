"""What the method does, costs and explains, measured. Four rooms, and two commands over all of them.

    run.py         python -m benchmarks.run fig6          run a suite: training runs, in parallel, results in results/SUITE/
    report.py      python -m benchmarks.report [PAGE]     draw its picture and write its page, from the CSVs alone
    reproduce/     the suites, their metrics and pages: does filtering do what the paper says?
    variants/      what only suites run: other filters, environments, implementations of PPO
    cost/          what scores and whole rounds cost
    explain/       what one saved round taught the agent
    plugin.py      python -m benchmarks.plugin PATH       the lines for CleanRL's own scripts, tried on a checkout of them
    files.py       CSVs, Markdown tables, pictures: what the rooms share

Begin with README.md, which says what was found.
"""
