"""A training script's method alone, its stages open to be replaced: what restarted.py and rules.py run.

Arguments, stages and logged names are the script's; checkpoints, snapshots, W&B and what else it has beside the method are not here.
"""

import time
from functools import partial
from types import SimpleNamespace

import numpy as np
import torch

from iif_core import log_influence


def train(script, name, *, restarted=False, score=None, select=None, update=None):
    """Train with the module `script` and the arguments of the command line.

    restarted: every rollout begins with a reset to the run's seed and draws its actions from the same random numbers.
    score, select, update: in place of the script's, called with the same arguments.
    """
    args, _ = script.parse_args()
    args.track = False
    score, select, update = score or script.score, select or script.select, update or script.update
    torch.set_num_threads(args.torch_threads)
    torch.manual_seed(args.seed)
    run_name = f"{args.env_id.split(':')[-1]}__{name}__{args.seed}__{time.time_ns()}"
    run = SimpleNamespace(run_name=run_name, iteration=0, global_step=0)
    envs, eval_envs = script.make_envs(args, None), script.make_eval_envs(args)
    agent = script.Agent(envs)
    optimizer_class = {"sgd": torch.optim.SGD, "adam": partial(torch.optim.Adam, eps=1e-5)}[args.optimizer]
    optimizer = optimizer_class(agent.parameters(), lr=args.learning_rate, fused=True)
    writer, next_obs = script.start_logging(args, run), None
    if args.eval_episodes:
        script.log_evaluation(writer, args, run, agent, eval_envs)
    for k in range(args.num_iterations):
        times = [time.perf_counter()]
        rollout_rng, shuffle_rng, filter_rng = script.random_streams(args.seed, k)
        if args.anneal_lr:
            optimizer.param_groups[0]["lr"] = (1 - k / args.num_iterations) * args.learning_rate
        if restarted:
            rollout_rng, _, _ = script.random_streams(args.seed, 0)
        if restarted or next_obs is None:
            next_obs, _ = envs.reset(seed=args.seed)
        batch, episodes, next_obs = script.rollout(agent, envs, next_obs, args.num_steps, rollout_rng)
        batch = {name: x.flatten(0, 1) for name, x in script.gae(batch, args.gamma, args.gae_lambda).items()}
        times.append(time.perf_counter())
        selection, filtered = torch.arange(args.batch_size), False
        if args.filter != "none":
            batch["scores"] = score(agent, batch, args, filter_rng)
            filtered = script.tells_apart(batch, episodes, args)
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
        script.log_round(writer, args, run, episodes, numbers)
        if args.eval_episodes:
            script.log_evaluation(writer, args, run, agent, eval_envs)
    writer.close()
