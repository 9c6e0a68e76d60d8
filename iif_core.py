"""Influence of the records of one PPO round on a target, and the filter that drops the most harmful ones.

At the snapshot theta(k) that collected a round of N records,

    direction = grad of f_return,   f_return(theta) = mean_j A_j * log pi_theta(a_j | s_j)
    score_i   = - < grad L_i, direction >,   L_i = the PPO policy loss of record i

A positive score says that a step on the record raises the target, a negative one that it lowers it. Iterative
influence-based filtering drops the lowest `percent` of the negative scores and trains on the rest.

Three things are independent here: what is attributed (the losses of the records), to what (any differentiable target), and how
(the direction: the raw gradient is TracIn, a preconditioned one is another method).

Source: Hu et al., "A Snapshot of Influence: A Local Data Attribution Framework for Online Reinforcement Learning",
NeurIPS 2025, arXiv 2505.19281: sections 3 (targets, scores) and 5.1 (the filter). Needs torch 2.6 or later; tested with 2.13.
"""

import contextlib
import functools
import sys
import threading
import warnings
from fractions import Fraction

import numpy as np
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode

_lock = threading.RLock()


def _one_at_a_time(function):
    """Let no thread find an agent, or torch, as another one has prepared it for scoring."""

    @functools.wraps(function)
    def locked(*args, **kwargs):
        with _lock: return function(*args, **kwargs)  # fmt: skip  # on one line no interrupt comes between

    return locked


@_one_at_a_time
def target_gradient(agent, target, num_records=None, *, chunk_size=None, _name="target"):
    """Gradient of a target function with respect to the trainable parameters of `agent`.

    target: with num_records None, target() is the scalar target. Otherwise target(inds) is the scalar share of the records
        `inds` (LongTensor on the CPU), and the target is the sum of the shares over chunks of `chunk_size` records.
    Returns {parameter name: gradient}; zeros for a parameter that the target does not use.
    Raises ValueError if the target is not a finite scalar or does not depend on the parameters.
    """
    agent, params = _agent_and_params(agent)
    calls = [()] if num_records is None else [(inds,) for inds in _chunks(num_records, chunk_size)]

    def share(call):
        return _scalar(_name, target(*call))

    def compute():
        return _complete(_name, _sum(_gradient(share(call), params) for call in calls), params)

    return _undisturbed(agent, lambda: share(calls[0]), compute)


@_one_at_a_time
def influence_scores(agent, record_losses, direction, num_records, *, chunk_size=None, forward_mode=False):
    """Scores score_i = - < grad L_i, direction >, exact for any network that does not mix records (paper section 3.2).

    record_losses: record_losses(inds) -> Tensor[len(inds)], the losses (to be minimised) of the records `inds` (ascending, a
        LongTensor on the CPU) at the agent's current parameters. A loss may depend on its own record only: what couples
        records, like the normalisation of advantages, is computed before and enters as a constant. Any loss will do;
            with an entropy bonus it is lambda inds: -adv[inds] * logprob(inds) - ent_coef * entropy(inds)
    direction: {parameter name: Tensor}, as target_gradient returns it.
    chunk_size: records per call of record_losses. Bounds the memory, does not change the scores.
    forward_mode: first try one forward-mode pass, which needs little memory and is faster for convolutional networks. Hooks,
        no_grad and some operations differ there from what training differentiates; the sum of the scores, which is known
        otherwise, shows it, and then they are computed in reverse mode as they are by default.
    Returns Tensor[num_records].
    Raises ValueError on losses of the wrong shape, losses that do not depend on the parameters or change from call to call
    (dropout that stays on in evaluation mode), and scores that are not finite.

    No per-record gradient is ever stored: in reverse mode the products are the derivatives in w of the inner product of
    grad sum_i w_i L_i with the direction, a backward pass through the backward pass.
    """
    agent, params = _agent_and_params(agent)
    _require(isinstance(direction, dict), "direction must be a dict of tensors", direction)
    wrong = [n for n in params | direction if n not in params or getattr(direction.get(n), "shape", None) != params[n].shape]
    _require(not wrong, f"direction must hold one tensor per trainable parameter, of its shape; check {wrong[:1]}")
    direction = {name: direction[name].detach().to(p.dtype) for name, p in params.items()}
    chunks = _chunks(num_records, chunk_size, halve=forward_mode)

    def losses(inds):
        return _vector("record_losses", record_losses(inds), inds)

    def compute():
        # random weights: with equal ones, a sum that happens to be zero would check nothing
        generator = torch.Generator("cpu").manual_seed(num_records)
        weights = (0.5 + torch.rand(num_records, generator=generator, device="cpu")).to(next(iter(params.values())).device)

        def known():
            total = _sum(_gradient((weights[inds] * losses(inds)).sum(), params) for inds in chunks)
            return _dot(_complete("record_losses", total, params), direction)

        return _finite("scores", -_products(agent, params, losses, direction, chunks, weights, known, forward_mode))

    return _undisturbed(agent, lambda: losses(chunks[0]), compute)


@_one_at_a_time
def return_influence(agent, logprob, advantages, *, minibatch_size=None, inds=None, chunk_size=None, forward_mode=False):
    """Scores of a PPO round against its own return: what iterative influence-based filtering drops by (paper section 5.1).

    logprob: logprob(inds) -> Tensor[len(inds)], log pi(a|s) of the actions taken in the records `inds` (ascending, a LongTensor
        on the CPU), at the agent's current parameters, which must be those that collected the round (every PPO ratio is 1, so
        that clipping is inactive and the gradient of a record's loss is - A * grad log pi).
    advantages: Tensor[N], the raw advantage estimates, in the order of time. The target uses them as they are; the losses use
        them normalised (unbiased std + 1e-8) within consecutive minibatches of `minibatch_size` records in the order of `inds`,
        or over the whole round if minibatch_size is None. A last minibatch shorter than two joins the one before it;
        minibatches of one are not normalised.
    inds: permutation of 0..N-1 (default: as stored). It orders the normalisation only: score i is that of record i.
    chunk_size: records per call of logprob. None lets the scores share the target's graph, which saves a pass and holds the
        graph of the whole round. N gives all records in one call, as a recurrent policy wants them.
    forward_mode: as in influence_scores.
    Rows that are not records (padding, reset rows of a vector environment) must be left out before the call.
    Returns Tensor[N]; all zero where the policy is so nearly deterministic that its gradients are rounding errors. Two
    attributes of it, for log_influence, compare the target's gradients over parts of the round (nan with chunk_size N):
        .agreement: cosine of the first and the second half in time;
        .noise_scale: tr(Cov) / |G|^2 in records, from random halves, inf where the estimate of |G|^2 is not positive
            (McCandlish et al. 2018, "An Empirical Model of Large-Batch Training", appendix A.1).
    Raises ValueError as influence_scores does, and on non-finite advantages.
    """
    agent, params = _agent_and_params(agent)
    advantages = _tensor("advantages", advantages, next(iter(params.values())).device).detach()
    ok = advantages.dim() == 1 and len(advantages) and advantages.is_floating_point()
    _require(ok, "advantages must be a float tensor of shape [N] (flatten a [steps, envs] one)", advantages)
    _finite("advantages", advantages)
    advantages = advantages.float() if torch.finfo(advantages.dtype).bits < 32 else advantages
    n = len(advantages)
    records = torch.arange(n, device="cpu")
    inds = records if inds is None else _tensor("inds", inds).cpu()
    ok = inds.shape == (n,) and not inds.is_floating_point() and torch.equal(inds.sort().values, records)
    _require(ok, f"inds must be a permutation of the {n} records", inds)

    inds = inds.long()
    size = n if minibatch_size is None else min(n, _positive("minibatch_size", minibatch_size))
    normalized = advantages.clone()
    if size > 1:
        rest = n % size + (size if n % size == 1 else 0)  # records after the last of the equal minibatches: one more
        for part, width in ((inds[: n - rest], size), (inds[n - rest :], rest)):
            if len(part):
                a = advantages[part].view(-1, width)
                normalized[part] = ((a - a.mean(1, keepdim=True)) / (a.std(1, keepdim=True) + 1e-8)).flatten()

    whole = chunk_size is not None and chunk_size >= n
    parts = [records] if whole else [part for part in _quarters(records) if len(part)]
    chunks = _chunks(n, chunk_size, halve=forward_mode)

    def log_pi(inds):
        return _vector("logprob", logprob(inds), inds)

    def target(share):
        """Its gradients over the parts, the graphs that they come from if `share`, and the rounding error relative to them."""
        gradients, graphs, left = [], [], 0
        for part in parts:
            gradients.append({})
            for inds in part.tensor_split(-(-len(part) // (chunk_size or n))):
                values, *graph = _open(params, log_pi, inds, advantages[inds] / n, create_graph=share)
                _finite("logprob", values)
                _add(gradients[-1], graph[-1])
                graphs += [graph] if share else []
                # a probability that rounds to one has lost its gradient
                left = left + (advantages[inds].abs() * values.expm1().abs().clamp(max=1)).sum()
        eps = max(torch.finfo(values.dtype).eps, _precision(agent))
        return gradients, graphs, float(eps * advantages.abs().sum() / left)

    def compute():
        share = not forward_mode and (chunk_size is None or whole)
        try:
            gradients, graphs, rounding = target(share)
        except RuntimeError as error:  # of a function that refuses to have its gradient differentiated
            if not share or isinstance(error, torch.OutOfMemoryError):
                raise
            gradients, graphs, rounding = target(False)
        total = _sum(gradients)
        direction = _complete("logprob", total, params)
        square = _dot(total, total)  # of the mean of A_i grad log pi_i, the direction: so it is sum_i A_i/n product_i
        known, weights = lambda: square, advantages / n
        products = _products(agent, params, log_pi, direction, chunks, weights, known, forward_mode, graphs, rounding)
        # L_i = -A_i * log pi_i, its constant taken out: a product with one is slow in forward mode
        scores = _finite("scores", normalized * products)
        scores.agreement, scores.noise_scale = _consistency(gradients, [len(part) for part in parts])
        return scores

    return _undisturbed(agent, lambda: log_pi(chunks[0]), compute)


@_one_at_a_time
def action_influence(agent, logprob_of_action, record_losses, num_records, *, chunk_size=None, forward_mode=False):
    """Scores of records against one action at one state, f_action = log pi(a|s) (paper sections 3.1 and 4.2).

    logprob_of_action: logprob_of_action() -> scalar, log pi(a|s) of the chosen state and action.
    The other arguments, the result and the errors are those of influence_scores.
    """
    direction = target_gradient(agent, logprob_of_action, _name="logprob_of_action")
    return influence_scores(agent, record_losses, direction, num_records, chunk_size=chunk_size, forward_mode=forward_mode)


def filter_bottom(scores, percent, *, of="negative"):
    """Indices of the records to keep, ascending (LongTensor), after dropping the lowest scores (paper algorithm 1).

    Drops the floor(percent * n / 100) lowest, where n counts the negative scores (of="negative", the paper's rule, which never
    drops another) or all of them (of="all"). Among equal scores the first goes first, so that the count is exact.
    Raises ValueError on scores that are empty, not 1-D or not finite, and on a percent outside [0, 100].
    """
    scores = _tensor("scores", scores).detach()
    _require(scores.dim() == 1 and len(scores) and not scores.is_complex(), "scores must have the shape [N]", scores)
    _finite("scores", scores)
    ok = isinstance(percent, (int, float, np.number)) and not isinstance(percent, bool) and 0 <= percent <= 100
    _require(ok, "percent must lie in [0, 100]", percent)
    _require(of in ("negative", "all"), "of must be 'negative' or 'all'", of)
    n = int((scores < 0).sum()) if of == "negative" else len(scores)
    drop = int(Fraction(str(float(percent))) * n / 100)  # exact: as floats, 0.57 percent of 10000 would be 56
    return scores.argsort(stable=True)[drop:].sort().values


def log_influence(writer, scores, kept, global_step, *, advantages=None, filtered=True):
    """Log the `influence/*` rows of one round through a TensorBoard SummaryWriter (W&B: sync_tensorboard=True).

    scores: [N], as return_influence returns them; kept: the indices trained on, or a weight of each record; advantages: [N] raw,
    for their Spearman correlation with the scores; filtered: False if the round was left whole by choice. Only finite scores
    enter; the others are counted in influence/nonfinite. An infinite noise scale is counted in influence/noise_scale_infinite.
    """
    row = {"agreement": getattr(scores, "agreement", np.nan), "noise_scale": getattr(scores, "noise_scale", np.nan)}
    if not np.isnan(row["noise_scale"]):
        row["noise_scale_infinite"] = np.isinf(row["noise_scale"])
    scores = torch.as_tensor(scores).detach().cpu().double().numpy()
    finite = np.isfinite(scores)
    x = scores[finite]
    row |= {"records_kept": len(kept), "dropped_fraction": (len(scores) - len(kept)) / max(len(scores), 1)}
    row |= {"filtered_round": filtered and scores.any(), "nonfinite": len(scores) - len(x)}
    if len(x):
        row |= {"negative_fraction": (x < 0).mean(), "score_mean": x.mean(), "score_std": x.std()}
        row |= {"score_min": x.min(), "score_max": x.max()}
        # Bins of one width with an edge at zero, so that harmful and helpful records never share one. All-equal scores get a
        # width of their own scale.
        width = max(x.max() - x.min(), 1e-6 * np.abs(x).max(), 1e-30) / 64
        edges = width * np.arange(np.floor(x.min() / width), np.floor(x.max() / width) + 2)
        writer.add_histogram("influence/scores", x.clip(edges[0], edges[-1]), global_step, bins=edges)
        if advantages is not None:
            _require(len(advantages) == len(scores), f"advantages: {len(advantages)} for {len(scores)} scores")
            advantages = torch.as_tensor(advantages).detach().cpu().double().numpy()[finite]
            ranks = _ranks(x), _ranks(advantages)
            if ranks[0].std() > 0 and ranks[1].std() > 0:  # undefined if either is constant
                row["advantage_correlation"] = np.corrcoef(ranks)[0, 1]
    for name, value in row.items():
        if np.isfinite(value):
            writer.add_scalar(f"influence/{name}", float(value), global_step)


# ---- how the scores are computed


def _gradient(value, params, **options):
    """{name: gradient} of a scalar, of the parameters that it depends on."""
    if not value.requires_grad:
        return {}
    grads = torch.autograd.grad(value.squeeze(), list(params.values()), allow_unused=True, **options)
    return {name: grad for name, grad in zip(params, grads) if grad is not None}


def _add(total, gradient):
    for name, grad in gradient.items():
        grad = grad.detach().to_dense() if grad.is_sparse else grad.detach()
        total[name] = total[name].add_(grad) if name in total else grad.clone()
    return total


def _sum(gradients):
    return functools.reduce(_add, gradients, {})


def _complete(what, gradient, params):
    """The gradient with zeros for what it does not depend on."""
    _require(
        gradient,
        f"{what}: the value does not depend on the trainable parameters of agent;"
        " does the closure run this very agent, without no_grad, detach and reentrant checkpoints?",
    )
    return {name: gradient[name] if name in gradient else torch.zeros_like(p) for name, p in params.items()}


def _open(params, losses, inds, weights, create_graph=True):
    """Losses of some records; their inds; weights w; and {name: gradient of w @ losses}, as a function of w."""
    values = losses(inds)
    w = weights.to(values.dtype, copy=True).requires_grad_()
    return values.detach(), inds, w, _gradient((w * values).sum(), params, create_graph=create_graph)


def _close(graphs, direction):
    """< grad L_i, direction > of all records of the graphs (inds, w, gradient): the derivatives in w of < gradient, direction >."""
    inds, weights, gradients = zip(*graphs)
    inds, pairs = torch.cat(inds), [(grad, direction[name]) for gradient in gradients for name, grad in gradient.items()]
    products = torch.zeros(len(inds), dtype=weights[0].dtype, device=weights[0].device)
    if pairs:
        grads, v = zip(*pairs)
        products[inds] = torch.cat(torch.autograd.grad(grads, weights, v, materialize_grads=True))
    return products


@forward_ad.dual_level()
def _forward_mode(agent, params, losses, direction, chunks):
    """The products as one Jacobian-vector product."""
    products, slots = [], [(m._parameters, name, p) for m in agent.modules() for name, p in m._parameters.items()]
    lent = {}  # plain tensors, so that no reverse graph is kept; without a tangent where it would be zero (the critic's)
    for name, p in params.items():
        lent[id(p)] = forward_ad.make_dual(p.detach(), direction[name]) if direction[name].any() else p.detach()
    try:
        for parameters, name, p in slots:
            parameters[name] = lent.get(id(p), p)
        for inds in chunks:
            value, product = forward_ad.unpack_dual(losses(inds))
            products.append(torch.zeros_like(value) if product is None else product)
    finally:
        for parameters, name, p in slots:
            parameters[name] = p
    return torch.cat(products).detach()


def _products(agent, params, losses, direction, chunks, weights, known, forward_mode, graphs=(), rounding=0.0):
    """< grad L_i, direction > of all records, [n]: by the first way whose sum, weighted, is known() (computed by training's own
    operations); zeros where `rounding`, the relative error of the gradients themselves, leaves nothing to tell.

    The ways: forward mode, if asked for; the target's graphs, if there are any; reverse mode, at the second try with plain
    kernels; at last one backward pass a record, which is slow, and right whatever training differentiates.
    """
    eps, reason = _precision(agent), ""
    tolerance = max(100 * eps if eps < 1e-6 else min(4 * eps, 0.03), rounding if rounding <= 0.1 else 0)
    known = functools.cache(known)

    def reverse(kernels=contextlib.nullcontext):
        products, total = [], {}
        with kernels():
            for inds in chunks:
                _, _, w, gradient = _open(params, losses, inds, weights[inds])
                products.append(_close([(inds - inds[0], w, gradient)], direction))
                _add(total, gradient)
        total = _complete("record_losses", total, params)
        floor = 10 * eps * (_dot(total, total) * _dot(direction, direction)) ** 0.5  # where it moves nothing, all is rounding
        return torch.cat(products), known() if kernels is _PlainKernels else _dot(total, direction), floor

    ways = [lambda: (_forward_mode(agent, params, losses, direction, chunks), known(), 0)] if forward_mode else []
    ways += [lambda: (_close(graphs, direction), known(), 0)] if graphs else []
    for way in [*ways, reverse, lambda: reverse(_PlainKernels)]:
        try:
            products, total, floor = way()
        except RuntimeError as error:  # NotImplementedError is one
            if isinstance(error, torch.OutOfMemoryError):
                raise
            reason = str(error).splitlines()[0][:120]
            continue
        parts = weights * products
        off = (parts.sum() - total).abs()
        if not off > tolerance * (parts.abs().sum() + total.abs()) + floor:
            return products
        if rounding > 0.1:
            return torch.zeros_like(products)
        reason = f"their sum is {float(off / (parts.abs().sum() + total.abs())):.1e} off"
    losses(chunks[0])  # raises if the closure itself is at fault
    warnings.warn(
        f"the scores are computed slowly, record by record: no other way is exact for this network ({reason}). If the closure"
        " enters torch.autocast, put the whole call into it."
    )
    gradients = (_gradient(value, params, retain_graph=True) for inds in chunks for value in losses(inds))
    return torch.stack([torch.as_tensor(_dot(gradient, direction)) for gradient in gradients])


class _PlainKernels(TorchFunctionMode):
    """In this thread, attention by operations that have second derivatives; and no cuDNN, whose recurrent cells have none."""

    def __enter__(self):
        self.cudnn = torch.backends.cudnn.enabled
        torch.backends.cudnn.enabled = False
        return super().__enter__()

    def __exit__(self, *error):
        torch.backends.cudnn.enabled = self.cudnn
        return super().__exit__(*error)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is nn.functional.scaled_dot_product_attention:
            return self.attention(*args, **kwargs)
        if function is nn.functional.multi_head_attention_forward and kwargs.get("need_weights") is False:
            return function(*args, **kwargs | {"need_weights": True})[0], None  # with its weights it is not fused
        return function(*args, **kwargs)

    @staticmethod
    def attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **kwargs):
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, -torch.inf)
        math = torch.ops.aten._scaled_dot_product_attention_math
        return math(query, key, value, attn_mask, dropout_p, is_causal, **kwargs)[0]


def _quarters(records):
    """The records as index tensors of first (0, 1) and second (2, 3) half in time, each cut into random halves (0, 2; 1, 3)."""
    generator = torch.Generator("cpu").manual_seed(len(records))
    halves = [half[torch.randperm(len(half), generator=generator, device="cpu")] for half in records.tensor_split(2)]
    return [part.sort().values for half in halves for part in half.tensor_split(2)]


def _consistency(gradients, sizes):
    """Agreement and noise scale from the gradients over the quarters, of sizes[i] records each, of one mean over all."""
    if len(sizes) < 4 or any(gradient.keys() != gradients[0].keys() for gradient in gradients):
        return np.nan, np.nan
    flat = (torch.stack([gradient[name].flatten() for gradient in gradients]) for name in gradients[0])
    gram = sum((x.conj() @ x.T).real for x in flat).double().cpu().numpy()
    n, (early, late), sides = sum(sizes), np.array([[1, 1, 0, 0], [0, 0, 1, 1]]), np.array([[1, 0, 1, 0], [0, 1, 0, 1]])
    length = np.sqrt((early @ gram @ early) * (late @ gram @ late))
    agreement = early @ gram @ late / length if length > 0 else np.nan
    first, second = (side * n / (side @ sizes) for side in sides)  # the mean gradient over each random half
    square, difference = first @ gram @ second, (first - second) @ gram @ (first - second)
    trace = difference / sum(1 / (side @ sizes) for side in sides)
    return float(agreement), float(trace / square) if square > 0 else np.inf if trace > 0 else np.nan


def _undisturbed(agent, probe, compute):
    """compute() with `agent` in evaluation mode, compiled code switched off, with gradients, on copies of its buffers; then all
    is put back.

    Where random numbers were drawn or buffers or attributes changed, probe() must still give the same value twice, or there is no
    one function to differentiate: then ValueError.
    """
    kept = [(m, dict(vars(m))) for m in agent.modules()]
    kept_dicts = [(d, dict(d)) for _, attributes in kept for d in attributes.values() if isinstance(d, dict)]
    slots = [(m._buffers, name, b) for m, _ in kept for name, b in m._buffers.items() if b is not None]
    devices = {p.device for p in agent.parameters() if p.is_cuda}
    rng, eager = [torch.get_rng_state(), *map(torch.cuda.get_rng_state, devices)], []

    def changed():
        pairs = [*zip(rng, [torch.get_rng_state(), *map(torch.cuda.get_rng_state, devices)])]
        pairs += [(b, buffers[name]) for buffers, name, b in slots if b.layout is torch.strided]
        if not all(a.shape == b.shape and torch.equal(a, b) for a, b in pairs):
            return True
        return any(vars(m).get(k) is not v for m, attributes in kept for k, v in attributes.items() if k != "training")

    def put_back():
        for stance in eager:
            stance.__exit__(None, None, None)
        for m, attributes in kept:
            for name in vars(m).keys() - attributes.keys():
                del vars(m)[name]
            vars(m).update(attributes)
        for d, content in kept_dicts:
            d.clear()
            d.update(content)
        torch.set_rng_state(rng[0])
        for device, state in zip(devices, rng[1:]):
            torch.cuda.set_rng_state(state, device)

    try:
        try:
            for m, _ in kept:
                # cuDNN's recurrent kernels have a backward in training mode only, and without dropout the two modes are one
                m.training = m.training and isinstance(m, nn.RNNBase) and m.dropout == 0
            parametrize._cache.clear()
            if "torch._dynamo" in sys.modules:  # compiled code cannot be differentiated twice
                eager.append(torch.compiler.set_stance("force_eager"))
            with torch.inference_mode(False), torch.enable_grad():
                for buffers, name, b in slots:
                    buffers[name] = b.detach().clone()
                result = compute()
                with torch.no_grad():
                    _require(
                        not changed() or torch.equal(probe(), probe()),
                        "the closure gives another value at each call (random numbers, or a buffer or attribute that it updates): make"
                        " it deterministic in evaluation mode, e.g. F.dropout(x, training=self.training), a stored action",
                    )
                return result
        finally:
            put_back()
    except BaseException:
        put_back()  # again, as an interrupt may have come in the middle of it
        raise


# ---- checks


def _require(condition, message, *got):
    if not condition:
        raise ValueError(message + "".join(f", got {_describe(value)}" for value in got))


def _agent_and_params(agent):
    agent = getattr(agent, "_orig_mod", agent)  # of a module from torch.compile: the module
    _require(isinstance(agent, nn.Module), "agent must be a torch.nn.Module", agent)
    params = {name: p for name, p in agent.named_parameters() if p.requires_grad}
    lazy = [name for name, p in agent.named_parameters() if nn.parameter.is_lazy(p)]
    _require(not lazy, f"agent is not initialised: run it once, so that {lazy[:1]} gets its shape")
    _require(params, "agent has no trainable parameters")
    return agent, params


def _precision(agent):
    """The relative precision that the network computes in."""
    coarse = torch.get_float32_matmul_precision() != "highest"  # TF32, or bfloat16 on some CPUs
    kinds = {(p.dtype, p.device.type) for p in agent.parameters() if p.is_floating_point() or p.is_complex()}
    eps = [torch.finfo(dtype).eps for dtype, _ in kinds]
    eps += [torch.finfo(torch.get_autocast_dtype(device)).eps for _, device in kinds if torch.is_autocast_enabled(device)]
    cudnn = torch.backends.cudnn.allow_tf32
    eps += [2.0**-8 for dtype, device in kinds if dtype == torch.float32 and (coarse or device == "cuda" and cudnn)]
    return max(eps, default=0.0)


def _chunks(num_records, chunk_size, halve=False):
    """Without a chunk_size all at once; in forward mode half of them, as it holds two numbers where training holds one."""
    n = _positive("num_records", num_records)
    whole = max(512, (n + 1) // 2) if halve else n
    return torch.arange(n, device="cpu").split(whole if chunk_size is None else _positive("chunk_size", chunk_size))


def _positive(name, value):
    ok = isinstance(value, (int, np.integer)) and not isinstance(value, bool) and value > 0
    _require(ok, f"{name} must be a positive integer", value)
    return int(value)


def _tensor(name, value, device=None):
    try:
        return torch.as_tensor(value, device=device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{name} must be a tensor: {error}") from None


def _scalar(name, value):
    ok = isinstance(value, torch.Tensor) and value.numel() == 1 and torch.isfinite(value)
    _require(ok, f"{name} must return a finite scalar tensor", value)
    parametrize._cache.clear()  # of parametrize.cached(): its tensors must not outlive the graph that is scored
    return value


def _vector(name, value, inds):
    ok = isinstance(value, torch.Tensor) and value.shape == (len(inds),) and value.is_floating_point()
    _require(ok, f"{name}(inds) must return a float tensor of shape [{len(inds)}]", value)
    parametrize._cache.clear()
    return value


def _finite(name, x):
    bad = (~torch.isfinite(x)).nonzero().flatten().tolist()
    if bad:
        raise ValueError(f"{name}: {len(bad)} of {len(x)} are not finite, the first at index {bad[0]} ({x[bad[0]].item()})")
    return x


def _describe(value):
    if isinstance(value, torch.Tensor) and value.numel() != 1:
        return f"{value.dtype} {list(value.shape)}"
    return f"{value!r} of type {type(value).__name__}"


def _dot(gradient, direction):
    """The real inner product, of complex parameters too."""
    return sum((grad.conj() * direction[name]).sum().real for name, grad in gradient.items())


def _ranks(x):
    """Ranks of x, equal values sharing their mean rank."""
    _, group, count = np.unique(x, return_inverse=True, return_counts=True)
    return (count.cumsum() - (count - 1) / 2)[group]
