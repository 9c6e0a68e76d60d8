"""Attribution methods: what each record of a round does to a target, as small functions over the core's two.

A method is a direction (how), and scores are its products with the gradients of the records' losses (what). Here the direction
comes from the raw gradient (TracIn), the Fisher matrix (influence functions), Adam's second moments, one layer, another half
of the round; and two methods follow the update's own steps (TracIn along the update, SGD-influence). Positive scores raise
the target.

A target is a function of an agent, target(agent) -> scalar; losses(inds) -> [len(inds)] are record losses at theta(k).
Sources: Pruthi et al. 2020 (TracIn), Koh and Liang 2017 (influence functions), Hara et al. 2019 (SGD-influence).
"""

import copy

import torch
from torch import nn
from torch.func import functional_call, grad, vjp, vmap

from iif_core import influence_scores, target_gradient

# ---- targets and losses


def f_return(batch):
    """The paper's target over the records of a flat round: mean of A * log pi(a|s), A the raw advantages."""
    return lambda agent: (batch["advantages"] * agent.get_logprob(batch["obs"], batch["actions"])).mean()


def surrogate(batch, clip_coef):
    """PPO's clipped surrogate over the records of a flat round, raw advantages. At theta(k) its gradient is f_return's."""

    def target(agent):
        ratio = (agent.get_logprob(batch["obs"], batch["actions"]) - batch["logprobs"]).exp()
        return torch.min(ratio * batch["advantages"], ratio.clamp(1 - clip_coef, 1 + clip_coef) * batch["advantages"]).mean()

    return target


def policy_losses(agent, batch, normalized):
    """losses(inds), PPO's policy losses at theta(k), where every ratio is 1: - normalised advantage * log pi(a|s)."""
    return lambda inds: -normalized[inds] * agent.get_logprob(batch["obs"][inds], batch["actions"][inds])


def normalize(advantages, minibatches):
    """Advantages [N] normalised within each of the minibatches (index tensors) as the update does; the others stay."""
    normalized = advantages.clone()
    for inds in minibatches:
        if len(inds) > 1:
            a = advantages[inds]
            normalized[inds] = (a - a.mean()) / (a.std() + 1e-8)
    return normalized


# ---- methods at theta(k)


def tracin(agent, losses, target, num_records):
    """The paper's scores for filtering: products with the target's gradient, at theta(k) alone."""
    return influence_scores(agent, losses, target_gradient(agent, lambda: target(agent)), num_records)


def last_layer(agent, losses, target, num_records):
    """TracIn over the policy's last linear layer only."""
    actor = getattr(agent, "actor_mean", None) or agent.actor
    *_, last = (m for m in actor.modules() if isinstance(m, nn.Linear))
    kept = {id(p) for p in last.parameters()}
    parameters = dict(agent.named_parameters())
    direction = target_gradient(agent, lambda: target(agent))
    direction = {name: v if id(parameters[name]) in kept else torch.zeros_like(v) for name, v in direction.items()}
    return influence_scores(agent, losses, direction, num_records)


def cross_fitted(agent, losses, target_share, num_records):
    """TracIn without any record in its own target: the first half of the round against the second half's target, and the
    other way round. target_share(inds) is the target over the records `inds`. Halves in time share no episode but one."""
    scores = torch.empty(num_records, dtype=next(agent.parameters()).dtype)
    first, second = torch.arange(num_records).tensor_split(2)
    for mine, others in ((first, second), (second, first)):
        direction = target_gradient(agent, lambda: target_share(others))
        scores[mine] = influence_scores(agent, lambda i: losses(mine[i]), direction, len(mine))
    return scores


def adam_scaled(agent, losses, target, num_records, optimizer):
    """TracIn for Adam, whose step divides by the root of its second moments: the direction is divided likewise."""
    direction = target_gradient(agent, lambda: target(agent))
    for name, p in agent.named_parameters():
        if name in direction and optimizer.state.get(p):
            (group,) = (group for group in optimizer.param_groups if any(p is q for q in group["params"]))
            step, second = optimizer.state[p]["step"].item(), optimizer.state[p]["exp_avg_sq"]
            direction[name] = direction[name] / ((second / (1 - group["betas"][1] ** step)).sqrt() + group["eps"])
    return influence_scores(agent, losses, direction, num_records)


def influence_functions(agent, losses, target, num_records, logprob, damping=0.1, iterations=20, tolerance=1e-3):
    """Scores with the direction (F + damping * s)^-1 grad f, F the Fisher matrix of the policy over the round.

    F v = mean_i g_i <g_i, v> with g_i = grad log pi_i: the core's two functions, no matrix. s = <g, F g> / <g, g> for the
    target's gradient g, so that the damping has no unit. Conjugate gradients until the residual is `tolerance` of g.
    """

    def fisher(v):
        products = -influence_scores(agent, logprob, v, num_records)
        return target_gradient(agent, lambda: (products * logprob(torch.arange(num_records))).mean())

    def dot(a, b):
        return sum((a[name] * b[name]).sum() for name in a)

    g = target_gradient(agent, lambda: target(agent))
    damping = damping * dot(g, fisher(g)) / dot(g, g)
    x = {name: torch.zeros_like(v) for name, v in g.items()}
    residual, p = dict(g), dict(g)
    rr = dot(g, g)
    for _ in range(iterations):
        if rr <= tolerance**2 * dot(g, g):
            break
        fp = fisher(p)
        fp = {name: fp[name] + damping * p[name] for name in p}
        alpha = rr / dot(p, fp)
        x = {name: x[name] + alpha * p[name] for name in x}
        residual = {name: residual[name] - alpha * fp[name] for name in x}
        rr, before = dot(residual, residual), rr
        p = {name: residual[name] + rr / before * p[name] for name in x}
    return influence_scores(agent, losses, x, num_records)


# ---- methods along the update


class RecordLosses(nn.Module):
    """PPO's whole loss of each record of a minibatch, as the scripts' update has it, callable by torch.func."""

    def __init__(self, agent, args):
        super().__init__()
        self.agent, self.args = agent, args

    def forward(self, obs, actions, logprobs, normalized, returns, values):
        clip = self.args.clip_coef
        logprob, entropy, value = self.agent.get_logprob_entropy_value(obs, actions)
        ratio, value = (logprob - logprobs).exp(), value.view(-1)
        v_loss = (value - returns).square()
        if self.args.clip_vloss:
            v_loss = torch.max(v_loss, (values + torch.clamp(value - values, -clip, clip) - returns).square())
        pg_loss = torch.max(-normalized * ratio, -normalized * ratio.clamp(1 - clip, 1 + clip))
        return pg_loss + self.args.vf_coef * v_loss - self.args.ent_coef * entropy


class Update:
    """A round's update as a function of the records' weights w [N]: in each of the real minibatches B,

        theta <- theta + the optimiser's step on 1/|B| * sum over i in B of w_i * grad L_i(theta),

    with the advantages normalised over all of B, whatever the weights. With weights of 1 it is the script's own update.
    A state is (parameters, first moments, second moments), dicts of tensors; plain SGD leaves the moments empty.
    """

    def __init__(self, agent, optimizer, batch, minibatches, args):
        self.agent, self.batch, self.minibatches, self.args = copy.deepcopy(agent), batch, minibatches, args
        self.losses = RecordLosses(self.agent, args)
        (self.group,) = optimizer.param_groups
        self.adam = isinstance(optimizer, torch.optim.Adam)
        parameters = {f"agent.{name}": p for name, p in agent.named_parameters()}
        moments = [{}, {}]
        self.steps_before = 0
        if self.adam:
            for moment, key in zip(moments, ("exp_avg", "exp_avg_sq")):
                for name, p in parameters.items():
                    moment[name] = optimizer.state[p][key].to(p) if optimizer.state.get(p) else torch.zeros_like(p)
            self.steps_before = max((int(state["step"]) for state in optimizer.state.values()), default=0)
        self.start = ({name: p.detach() for name, p in parameters.items()}, *moments)
        columns = ("obs", "actions", "logprobs", "returns", "values")
        self.columns = [[batch[column][inds] for column in columns] for inds in minibatches]
        normalize_ = normalize if args.norm_adv else lambda advantages, _: advantages
        self.normalized = [normalize_(batch["advantages"], [inds])[inds] for inds in minibatches]

    def record_losses(self, t, parameters):
        obs, actions, logprobs, returns, values = self.columns[t]
        return functional_call(self.losses, parameters, (obs, actions, logprobs, self.normalized[t], returns, values))

    def step(self, t, state, weights):
        """The state after step t, from the one before it and the weights [|B|] of its minibatch."""
        parameters, first, second = state
        grads = grad(lambda parameters: (weights * self.record_losses(t, parameters)).mean())(parameters)
        lr = self.group["lr"]
        if self.args.max_grad_norm:
            norm = sum(g.square().sum() for g in grads.values()).sqrt()
            coef = (self.args.max_grad_norm / (norm + 1e-6)).clamp(max=1)
            grads = {name: g * coef for name, g in grads.items()}
        if not self.adam:
            return {name: p - lr * grads[name] for name, p in parameters.items()}, first, second
        (b1, b2), eps, count = self.group["betas"], self.group["eps"], self.steps_before + t + 1
        first = {name: b1 * m + (1 - b1) * grads[name] for name, m in first.items()}
        second = {name: b2 * v + (1 - b2) * grads[name].square() for name, v in second.items()}
        moved = {}
        for name, p in parameters.items():
            v = second[name] / (1 - b2**count)
            # where nothing ever had a gradient, the root has no derivative, and the step is zero all the same
            root = torch.where(v > 0, torch.where(v > 0, v, 1.0).sqrt(), 0.0)
            moved[name] = p - lr * first[name] / (1 - b1**count) / (root + eps)
        return moved, first, second

    def path(self):
        """The states before each step and at the end, all records in."""
        states = [self.start]
        for t, inds in enumerate(self.minibatches):
            with torch.no_grad():
                states.append(self.step(t, states[-1], torch.ones(len(inds), dtype=self.normalized[t].dtype)))
        return states

    @torch.no_grad()
    def ends(self, weights):
        """Parameters at the end for each row of weights [K, N], side by side: {name: [K, ...]}."""
        k = len(weights)
        states = tuple({name: x.expand(k, *x.shape) for name, x in part.items()} for part in self.start)
        for t, inds in enumerate(self.minibatches):
            states = vmap(lambda state, w: self.step(t, state, w))(states, weights[:, inds])
        return states[0]

    def at(self, parameters):
        """The agent with these parameters; the same one each time."""
        with torch.no_grad():
            for name, p in self.agent.named_parameters():
                p.copy_(parameters[f"agent.{name}"])
        return self.agent


def tracin_along(update, target, num_records):
    """The paper's full form (section 3.2): products at the parameters before each step, summed over the steps in which the
    record takes part. The record's loss is PPO's clipped policy loss of that minibatch."""
    scores = torch.zeros(num_records, dtype=update.batch["advantages"].dtype)
    clip = update.args.clip_coef
    for t, ((parameters, _, _), mb_inds) in enumerate(zip(update.path(), update.minibatches)):
        agent = update.at(parameters)
        obs, actions, logprobs, *_ = update.columns[t]
        normalized = update.normalized[t]

        def losses(inds):
            ratio = (agent.get_logprob(obs[inds], actions[inds]) - logprobs[inds]).exp()
            return torch.max(-normalized[inds] * ratio, -normalized[inds] * ratio.clamp(1 - clip, 1 + clip))

        direction = target_gradient(agent, lambda: target(agent))
        scores[mb_inds] += influence_scores(agent, losses, direction, len(mb_inds))
    return scores


def sgd_influence(update, target, num_records):
    """The exact derivative of the target at the end of the update with respect to the weight of each record.

    Backward through the update's own steps: with u_t the target's gradient with respect to the state before step t,
    (u_t, what the weights of its minibatch add) are the vector-Jacobian product of u_{t+1} with the step. One state a step is
    stored. With plain SGD this is Hara et al.'s u_t = (1 - lr H_t) u_{t+1}; Adam's moments are part of the state.
    """
    scores = torch.zeros(num_records, dtype=update.batch["advantages"].dtype)
    *states, end = update.path()
    agent = update.at(end[0])
    direction = target_gradient(agent, lambda: target(agent))
    u = (
        {name: direction[name.removeprefix("agent.")] for name in end[0]},
        *({name: torch.zeros_like(x) for name, x in part.items()} for part in end[1:]),
    )
    for t in reversed(range(len(states))):
        inds = update.minibatches[t]
        ones = torch.ones(len(inds), dtype=scores.dtype)
        _, back = vjp(lambda state, weights: update.step(t, state, weights), states[t], ones)
        u, share = back(u)
        scores[inds] += share
    return scores
