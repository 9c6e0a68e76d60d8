"""ppo_iif.py, whose every rollout begins with a reset to the same seed and draws its actions from the same random numbers.

So do the rounds of influence-based filtering in the authors' code, where each is a process of its own with the run's seed; their
standard runs go on from round to round. Arguments, stages and logged names are those of ppo_iif.py; checkpoints, snapshots, W&B and
what else it has beside the method are not here.
"""

import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from iif_core import log_influence  # noqa: E402
from ppo_iif import (  # noqa: E402
    Agent,
    gae,
    log_evaluation,
    log_round,
    make_envs,
    make_eval_envs,
    parse_args,
    random_streams,
    rollout,
    score,
    select,
    start_logging,
    tells_apart,
    update,
)

if __name__ == "__main__":
    args, _ = parse_args()
    args.track = False
    torch.set_num_threads(args.torch_threads)
    torch.manual_seed(args.seed)
    run_name = f"{args.env_id.split(':')[-1]}__restarted__{args.seed}__{time.time_ns()}"
    run = SimpleNamespace(run_name=run_name, iteration=0, global_step=0)
    envs, eval_envs = make_envs(args, None), make_eval_envs(args)
    agent = Agent(envs)
    optimizer_class = {"sgd": torch.optim.SGD, "adam": partial(torch.optim.Adam, eps=1e-5)}[args.optimizer]
    optimizer = optimizer_class(agent.parameters(), lr=args.learning_rate, fused=True)
    writer = start_logging(args, run)
    if args.eval_episodes:
        log_evaluation(writer, args, run, agent, eval_envs)
    for k in range(args.num_iterations):
        times = [time.perf_counter()]
        _, shuffle_rng, filter_rng = random_streams(args.seed, k)
        rollout_rng, _, _ = random_streams(args.seed, 0)  # here is the difference, in this line and the next
        next_obs, _ = envs.reset(seed=args.seed)
        batch, episodes, _ = rollout(agent, envs, next_obs, args.num_steps, rollout_rng)
        batch = {name: x.flatten(0, 1) for name, x in gae(batch, args.gamma, args.gae_lambda).items()}
        times.append(time.perf_counter())
        selection, filtered = torch.arange(args.batch_size), False
        if args.filter != "none":
            batch["scores"] = score(agent, batch, args, filter_rng)
            filtered = tells_apart(batch, episodes, args)
        if filtered:
            selection = select(batch, args, filter_rng)
        times.append(time.perf_counter())
        losses, _ = update(agent, optimizer, batch, selection, args, shuffle_rng)
        times.append(time.perf_counter())

        run.iteration, run.global_step = k + 1, (k + 1) * args.batch_size
        if "scores" in batch:
            log_influence(
                writer, batch["scores"], selection, run.global_step, advantages=batch["advantages"], filtered=filtered
            )
        numbers = {f"losses/{name}": value for name, value in losses.items()} | {"charts/round": k}
        numbers |= zip(("time/rollout", "time/scoring", "time/update"), np.diff(times))
        numbers["charts/SPS"] = int(args.batch_size / (times[-1] - times[0]))
        log_round(writer, args, run, episodes, numbers)
        if args.eval_episodes:
            log_evaluation(writer, args, run, agent, eval_envs)
    writer.close()
