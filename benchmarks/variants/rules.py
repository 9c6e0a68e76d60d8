"""Other ways to use the scores or the agreement of a round, each tried against plain PPO and influence-based filtering:

python benchmarks/variants/rules.py --script ppo_iif --rule RULE --filter influence [the script's arguments]

agreeing     filter only the rounds whose agreement is above AGREEING
scaled       no filter; the learning rate of a round is multiplied by its agreement, but at least by LEAST
previous     the scores are those of a direction from the records of the round before
average      the same with the running mean of the directions of all rounds before, DECAY a round
as-far       influence, with the steps of the update shortened until the policy moves no further than with the whole round
least-score  drop half of the records, those with the least |score|: less work for the same learning?
least-advantage   its control: half of the records, those with the least |advantage|
"""

import argparse
import copy
import importlib
import math
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.variants.loop import train  # noqa: E402
from iif_core import influence_scores, target_gradient  # noqa: E402

AGREEING, LEAST, DECAY = 0.25, 0.1, 0.8


def above(threshold):
    def select(script):
        def chosen(batch, args, generator):
            if not batch["scores"].agreement > threshold:
                return torch.arange(args.batch_size)
            return script.select(batch, args, generator)

        return chosen

    return {"select": select}


def scaled(script):
    def update(agent, optimizer, batch, selection, args, generator):
        (group,) = optimizer.param_groups
        rate, agreement = group["lr"], batch["scores"].agreement
        group["lr"] = rate * (1.0 if math.isnan(agreement) else max(LEAST, agreement))
        result = script.update(agent, optimizer, batch, selection, args, generator)
        group["lr"] = rate
        return result

    return update


def everything(script):
    return lambda batch, args, generator: torch.arange(args.batch_size)


class Directions:
    """Scores of a round by the direction of the rounds before it; the first round's by its own."""

    def __init__(self, script, decay):
        self.script, self.decay, self.old, self.direction = script, decay, None, None

    def __call__(self, agent, batch, args, generator):
        stream = generator.get_state()
        scores = self.script.score(agent, batch, args, generator)
        if self.old is not None:  # at theta(k), by the policy ratio to the policy that collected them
            advantages = self.normalized(batch["advantages"], args, generator.set_state(stream))
            fresh = target_gradient(agent, lambda: self.target(agent, self.old))
            old = self.direction or fresh
            self.direction = {name: self.decay * old[name] + (1 - self.decay) * fresh[name] for name in fresh}

            def losses(inds):
                return -advantages[inds] * agent.get_logprob(batch["obs"][inds], batch["actions"][inds])

            other = influence_scores(agent, losses, self.direction, args.batch_size)
            other.agreement, other.noise_scale = scores.agreement, scores.noise_scale
            scores = other
        self.old = {name: batch[name] for name in ("obs", "actions", "logprobs", "advantages")}
        return scores

    @staticmethod
    def target(agent, batch):
        ratio = (agent.get_logprob(batch["obs"], batch["actions"]) - batch["logprobs"]).exp()
        return (batch["advantages"] * ratio).mean()

    @staticmethod
    def normalized(advantages, args, generator):
        """As the script's score has them: within minibatches of the same shuffle."""
        if args.norm_adv and args.minibatch_size > 1:
            advantages = advantages.clone()
            for inds in torch.randperm(args.batch_size, generator=generator).split(args.minibatch_size):
                advantages[inds] = (advantages[inds] - advantages[inds].mean()) / (advantages[inds].std() + 1e-8)
        return advantages


def moved(agent, batch):
    """KL divergence from theta(k), estimated over the round."""
    with torch.no_grad():
        logratio = agent.get_logprob(batch["obs"], batch["actions"]) - batch["logprobs"]
    return (logratio.exp() - 1 - logratio).mean().item()


def no_further(script):
    """The update over what is selected, its learning rate halved until the policy moves no further than over the whole round."""

    def update(agent, optimizer, batch, selection, args, generator):
        if len(selection) == args.batch_size:
            return script.update(agent, optimizer, batch, selection, args, generator)
        (group,), stream = optimizer.param_groups, generator.get_state()
        rate, before = group["lr"], copy.deepcopy((agent.state_dict(), optimizer.state_dict()))

        def attempt(records, factor):
            agent.load_state_dict(before[0])
            optimizer.load_state_dict(copy.deepcopy(before[1]))
            group = optimizer.param_groups[0]
            group["lr"] = rate * factor
            generator.set_state(stream)
            result = script.update(agent, optimizer, batch, records, args, generator)
            group["lr"] = rate
            return result

        attempt(torch.arange(args.batch_size), 1.0)
        limit, factor = moved(agent, batch), 1.0
        while True:
            result = attempt(selection, factor)
            if moved(agent, batch) <= limit or factor < 0.1:
                return result
            factor /= 2**0.5

    return update


def least(column):
    def select(script):
        def chosen(batch, args, generator):
            order = batch[column].abs().cpu().argsort(stable=True)
            return order[args.batch_size // 2 :].sort().values

        return chosen

    return {"select": select}


RULES = {  # {stage: function of the script that gives what replaces it}
    "agreeing": above(AGREEING),
    "scaled": {"select": everything, "update": scaled},
    "previous": {"score": lambda script: Directions(script, 0.0)},
    "average": {"score": lambda script: Directions(script, DECAY)},
    "as-far": {"update": no_further},
    "least-score": least("scores"),
    "least-advantage": least("advantages"),
}

PARSER = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
PARSER.add_argument("--script", required=True)
PARSER.add_argument("--rule", required=True, choices=list(RULES))

if __name__ == "__main__":
    own, sys.argv[1:] = PARSER.parse_known_args()
    script = importlib.import_module(own.script)
    train(script, own.rule, **{stage: make(script) for stage, make in RULES[own.rule].items()})
