"""Influence of the records of one PPO round on a target, and the filter that drops the most harmful ones.

At the snapshot theta(k) that collected a round of N records,

    direction = grad of f_return,   f_return(theta) = mean_j A_j * log pi_theta(a_j | s_j)          (one backward pass)
    score_i   = - < grad L_i, direction >,   L_i = the PPO policy loss of record i                   (one forward-mode pass)

A positive score says that a step on the record raises the target, a negative one that it lowers it. Iterative
influence-based filtering drops the lowest `percent` of the negative scores and trains on the rest.

Three things are independent here: what is attributed (the losses of the records), to what (any differentiable target), and how
(the direction: the raw gradient is TracIn, a preconditioned one is another method).

Source: Hu et al., "A Snapshot of Influence: A Local Data Attribution Framework for Online Reinforcement Learning",
NeurIPS 2025, arXiv 2505.19281: sections 3 (targets, scores) and 5.1 (the filter). Needs torch 2.6 or later; tested with 2.13.
"""

import contextlib
import sys
from fractions import Fraction

import numpy as np
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel


def target_gradient(agent, target, num_records=None, *, chunk_size=None):
    """Gradient of a target function with respect to the trainable parameters of `agent`.

    target: with num_records None, target() is the scalar target. Otherwise target(inds) is the scalar share of the records
        `inds` (LongTensor on the CPU), and the target is the sum of the shares over chunks of `chunk_size` records.
    Returns {parameter name: gradient}; zeros for a parameter that the target does not use.
    Raises ValueError if the target is not a finite scalar or does not depend on the parameters.
    """
    agent, params = _agent_and_params(agent)
    with _scoring(agent, target) as call:
        return _gradient(params, call, [()] if num_records is None else [(inds,) for inds in _chunks(num_records, chunk_size)])


def influence_scores(agent, record_losses, direction, num_records, *, chunk_size=None):
    """Scores score_i = - < grad L_i, direction >, exact for any network that does not mix records (paper section 3.2).

    record_losses: record_losses(inds) -> Tensor[len(inds)], the losses (to be minimised) of the records `inds` (consecutive
        ones, a LongTensor on the CPU) at the agent's current parameters. A loss may depend on its own record only: what
        couples records, like the normalisation of advantages, is computed before and enters as a constant. Any loss will do;
            with an entropy bonus it is lambda inds: -adv[inds] * logprob(inds) - ent_coef * entropy(inds)
    direction: {parameter name: Tensor}, as target_gradient returns it.
    chunk_size: records per call of record_losses. Bounds the memory, does not change the scores. None: half of them (or 512, if
        that is more), as forward mode holds two numbers where the training's backward pass holds one. A recurrent policy
        that has to run through all steps at once is best given num_records.
    Returns Tensor[num_records].
    Raises ValueError on losses of the wrong shape, losses that do not depend on the parameters or change from call to call
    (dropout that stays on in evaluation mode), and scores that are not finite.

    The scores are one Jacobian-vector product, computed in forward mode: no per-record gradient is ever stored. An operation
    without a forward-mode formula is retried with the plain kernels, then by double backward, which is as exact.
    """
    agent, params = _agent_and_params(agent)
    if not isinstance(direction, dict):
        raise ValueError(f"direction must be a dict of tensors, as target_gradient returns it, got {_describe(direction)}")
    wrong = [
        n for n in {**params, **direction} if n not in params or getattr(direction.get(n), "shape", None) != params[n].shape
    ]
    if wrong:
        raise ValueError(f"direction must hold one tensor per trainable parameter, of its shape; check {wrong[0]!r}")
    with _scoring(agent, record_losses) as call:
        products = _products(
            agent,
            params,
            lambda i: _vector("record_losses", call(i), i),
            direction,
            _chunks(num_records, chunk_size, halve=True),
        )
    _check_finite("scores", products)
    return -products


def return_influence(agent, logprob, advantages, *, minibatch_size=None, inds=None, chunk_size=None):
    """Scores of a PPO round against its own return: what iterative influence-based filtering drops by (paper section 5.1).

    logprob: logprob(inds) -> Tensor[len(inds)], log pi(a|s) of the actions taken in the records `inds`, at the agent's current
        parameters, which must be those that collected the round (every PPO ratio is 1, so that clipping is inactive and the
        gradient of a record's loss is - A * grad log pi).
    advantages: Tensor[N], the raw advantage estimates. The target uses them as they are; the losses use them normalised
        (unbiased std + 1e-8) within consecutive minibatches of `minibatch_size` records in the order of `inds`, or over the
        whole round if minibatch_size is None. A last minibatch shorter than two joins the one before it; minibatches of one
        are not normalised.
    inds: permutation of 0..N-1 (default: as stored). It orders the normalisation only: score i is that of record i.
    chunk_size: as in influence_scores; the target takes all records at once if it is None.
    Rows that are not records (padding, reset rows of a vector environment) must be left out before the call.
    Returns Tensor[N]. Raises ValueError as influence_scores does, and on non-finite advantages.
    """
    agent, params = _agent_and_params(agent)
    advantages = torch.as_tensor(advantages, device=next(iter(params.values())).device).detach()
    if advantages.dim() != 1 or not advantages.is_floating_point():
        raise ValueError(
            f"advantages must be a float tensor of shape [N] (flatten a [steps, envs] one), got {_describe(advantages)}"
        )
    n = _positive("advantages: the number of records", len(advantages))
    _check_finite("advantages", advantages)
    inds = torch.arange(n, device="cpu") if inds is None else torch.as_tensor(inds).cpu()
    if inds.shape != (n,) or inds.is_floating_point() or not torch.equal(inds.sort().values, torch.arange(n, device="cpu")):
        raise ValueError(f"inds must be a permutation of the {n} records, got {_describe(inds)} that is not one")

    inds = inds.long()
    size = n if minibatch_size is None else min(n, _positive("minibatch_size", minibatch_size))
    normalized = advantages.clone()
    if size > 1:
        rest = n % size + (size if n % size == 1 else 0)  # records after the last of the equal minibatches: one more
        for part, width in ((inds[: n - rest], size), (inds[n - rest :], rest)):
            if len(part):
                a = advantages[part].view(-1, width)
                normalized[part] = ((a - a.mean(1, keepdim=True)) / (a.std(1, keepdim=True) + 1e-8)).flatten()

    with _scoring(agent, logprob) as call:

        def log_pi(i):
            return _vector("logprob", call(i), i)

        shares = [(i,) for i in _chunks(n, chunk_size)]
        direction = _gradient(params, lambda i: (advantages[i] * log_pi(i)).sum() / n, shares, "logprob")
        products = _products(agent, params, log_pi, direction, _chunks(n, chunk_size, halve=True))
    # The direction is the mean of A_i * grad log pi_i, so that its square is known twice.
    _check_sum(advantages * products / n, sum((v * v).sum() for v in direction.values()))
    scores = normalized * products  # L_i = -A_i * log pi_i, its constant taken out: a product with one is slow in forward mode
    _check_finite("scores", scores)
    return scores


def action_influence(agent, logprob_of_action, record_losses, num_records, *, chunk_size=None):
    """Scores of records against one action at one state, f_action = log pi(a|s) (paper sections 3.1 and 4.2).

    logprob_of_action: logprob_of_action() -> scalar, log pi(a|s) of the chosen state and action.
    The other arguments, the result and the errors are those of influence_scores.
    """
    agent, params = _agent_and_params(agent)
    with _scoring(agent, logprob_of_action) as call:
        direction = _gradient(params, call, [()], "logprob_of_action")
    return influence_scores(agent, record_losses, direction, num_records, chunk_size=chunk_size)


def filter_bottom(scores, percent, *, of="negative"):
    """Indices of the records to keep, ascending (LongTensor), after dropping the lowest scores (paper algorithm 1).

    Drops the floor(percent * n / 100) lowest, where n counts the negative scores (of="negative", the paper's rule, which never
    drops another) or all of them (of="all"). Among equal scores the first goes first, so that the count is exact.
    Raises ValueError on scores that are empty, not 1-D or not finite, and on a percent outside [0, 100].
    """
    scores = torch.as_tensor(scores).detach()
    if scores.dim() != 1:
        raise ValueError(f"scores must have the shape [N], got {_describe(scores)}")
    _positive("scores: the number of records", len(scores))
    _check_finite("scores", scores)
    if isinstance(percent, (bool, str)) or percent is None or not 0 <= percent <= 100:
        raise ValueError(f"percent must lie in [0, 100], got {percent}")
    if of not in ("negative", "all"):
        raise ValueError(f"of must be 'negative' or 'all', got {of!r}")
    n = int((scores < 0).sum()) if of == "negative" else len(scores)
    drop = int(Fraction(str(float(percent))) * n / 100)  # exact: as floats, 0.57 percent of 10000 would be 56
    return scores.argsort(stable=True)[drop:].sort().values


def log_influence(writer, scores, kept, global_step, *, advantages=None, filtered=True):
    """Log the `influence/*` rows of one round through a TensorBoard SummaryWriter (W&B: sync_tensorboard=True).

    scores: [N]; kept: the indices trained on; advantages: [N] raw, for their Spearman correlation with the scores; filtered:
    False if the round was left whole by choice. Only finite scores enter; the others are counted in influence/nonfinite.
    """
    scores = torch.as_tensor(scores).detach().cpu().double().numpy()
    finite = np.isfinite(scores)
    x = scores[finite]
    row = {
        "records_kept": len(kept),
        "dropped_fraction": 1 - len(kept) / len(scores) if len(scores) else 0.0,
        "filtered_round": int(filtered),
        "nonfinite": int((~finite).sum()),
    }
    if len(x):
        row |= {"negative_fraction": (x < 0).mean(), "score_mean": x.mean(), "score_std": x.std()}
        row |= {"score_min": x.min(), "score_max": x.max()}
        # Bins of one width with an edge at zero, so that harmful and helpful records never share one. All-equal scores get a
        # width of their own scale.
        width = max(x.max() - x.min(), 1e-6 * np.abs(x).max(), 1e-30) / 64
        edges = width * np.arange(np.floor(x.min() / width), np.floor(x.max() / width) + 2)
        writer.add_histogram("influence/scores", x.clip(edges[0], edges[-1]), global_step, bins=edges)
        if advantages is not None:
            if len(advantages) != len(scores):
                raise ValueError(f"advantages: {len(advantages)} for {len(scores)} scores")
            advantages = torch.as_tensor(advantages).detach().cpu().double().numpy()[finite]
            rank_of_score, rank_of_advantage = _ranks(x), _ranks(advantages)
            if rank_of_score.std() > 0 and rank_of_advantage.std() > 0:  # undefined if either is constant
                row["advantage_correlation"] = np.corrcoef(rank_of_score, rank_of_advantage)[0, 1]
    for name, value in row.items():
        if np.isfinite(value):
            writer.add_scalar(f"influence/{name}", float(value), global_step)


# ---- how the scores are computed


def _gradient(params, target, chunks, what="target"):
    """Sum over `chunks` (tuples of arguments of target) of the gradient of target, {name: Tensor}."""
    total = {}
    for chunk in chunks:
        value = target(*chunk)
        if not isinstance(value, torch.Tensor) or value.numel() != 1 or not torch.isfinite(value):
            got = f"{value.item()}" if isinstance(value, torch.Tensor) and value.numel() == 1 else _describe(value)
            raise ValueError(f"{what} must return a finite scalar tensor, got {got}")
        if not value.requires_grad:
            continue
        grads = torch.autograd.grad(value.squeeze(), list(params.values()), allow_unused=True)
        for name, grad in zip(params, grads):
            if grad is not None:
                total[name] = total[name].add_(grad) if name in total else grad.clone()
    if not total:
        raise ValueError(f"{what}: {_INDEPENDENT}")
    return {name: total[name] if name in total else torch.zeros_like(p) for name, p in params.items()}


def _products(agent, params, losses, direction, chunks):
    """< grad L_i, direction > of all records, by the first way that the operations of the network allow."""
    ways = [
        (way, kernels) for way in (_forward_mode, _double_backward) for kernels in (contextlib.nullcontext, _plain_kernels)
    ]
    for way, kernels in ways:
        try:
            with kernels():
                return way(agent, params, losses, direction, chunks).detach()
        except RuntimeError as error:  # NotImplementedError is one
            if isinstance(error, torch.OutOfMemoryError) or way is _double_backward and kernels is _plain_kernels:
                raise


@contextlib.contextmanager
def _lent(agent, tensors):
    """Let `agent` run with other tensors in place of its parameters, {id(parameter): tensor}, tied ones included."""
    slots = [(m._parameters, name, p) for m in agent.modules() for name, p in m._parameters.items() if id(p) in tensors]
    try:
        for parameters, name, p in slots:
            parameters[name] = tensors[id(p)]
        yield
    finally:
        for parameters, name, p in slots:
            parameters[name] = p


@contextlib.contextmanager
def _no_grad_stops_tangents():
    """Let no_grad in a closure cut the derivative in forward mode as it does in reverse mode; by itself it would not.

    Every Python way to switch gradients calls torch._C._set_grad_enabled. (A TorchFunctionMode could watch for it without
    replacing it, but costs a quarter of a forward and backward pass of a small network.)
    """
    set_grad_enabled = torch._C._set_grad_enabled

    def set_both(enabled):
        set_grad_enabled(enabled)
        torch._C._set_fwd_grad_enabled(enabled)

    torch._C._set_grad_enabled = set_both
    # A torch.library.custom_op skips its autograd, and so drops the tangents silently, where no argument requires a gradient
    any_requires_grad, torch._C._any_requires_grad = torch._C._any_requires_grad, lambda *_, **__: True
    try:
        yield
    finally:
        torch._C._set_grad_enabled = set_grad_enabled
        torch._C._any_requires_grad = any_requires_grad


@contextlib.contextmanager
def _constant_inputs_of_convolutions():
    """Two convolutions where the input has no tangent (the first layer's images), in forward mode; torch alone makes a tangent
    of zeros and convolves it as well."""

    def skipping(conv):
        def call(input, weight, bias=None, *args, **kwargs):
            if torch._C._functorch.peek_interpreter_stack() is not None:  # within vmap, duals cannot be taken apart
                return conv(input, weight, bias, *args, **kwargs)
            (x, dx), (w, dw), (b, db) = (forward_ad.unpack_dual(t) if t is not None else (t, t) for t in (input, weight, bias))
            if dx is not None or dw is None or not torch._C._is_fwd_grad_enabled():
                return conv(input, weight, bias, *args, **kwargs)
            return forward_ad.make_dual(conv(x, w, b, *args, **kwargs), conv(x, dw, db, *args, **kwargs))

        return call

    names = ("conv1d", "conv2d", "conv3d")
    before = {name: getattr(F, name) for name in names}
    try:
        for name in names:
            setattr(F, name, skipping(before[name]))
        yield
    finally:
        for name in names:
            setattr(F, name, before[name])


def _forward_mode(agent, params, losses, direction, chunks, all_tangents=False):
    products = []
    with forward_ad.dual_level():
        # a parameter that the target does not use (the critic's) needs no tangent
        tangents = {id(p): direction[name].to(p.dtype) for name, p in params.items()}
        lent = {id(p): p.detach() for p in params.values()}
        with_tangent = {key for key, tangent in tangents.items() if all_tangents or tangent.any()}
        lent |= {key: forward_ad.make_dual(lent[key], tangents[key]) for key in with_tangent}
        with _lent(agent, lent), _no_grad_stops_tangents(), _constant_inputs_of_convolutions():
            for inds in chunks:
                value, product = forward_ad.unpack_dual(losses(inds))
                # Nothing lent requires a gradient, so no reverse graph is kept. If the losses require one all the same, the
                # closure holds a parameter itself, not through the agent, and forward mode has missed it.
                if value.requires_grad or (product is None and all_tangents):
                    raise NotImplementedError("the losses depend on no parameter of the agent, or on one held by the closure")
                products.append(product)
    if any(product is None for product in products):  # the losses use no parameter of the target, or none at all
        return _forward_mode(agent, params, losses, direction, chunks, all_tangents=True)
    return torch.cat(products)


def _double_backward(agent, params, losses, direction, chunks):
    products = []
    for inds in chunks:
        value = losses(inds)
        weights = torch.ones_like(value, requires_grad=True)
        grads = [None]
        if value.requires_grad:
            grads = torch.autograd.grad(weights @ value, list(params.values()), create_graph=True, allow_unused=True)
        used = [(grad, direction[name].to(grad.dtype)) for name, grad in zip(params, grads) if grad is not None]
        if not used:
            raise ValueError(f"record_losses: {_INDEPENDENT}")
        products.append(torch.autograd.grad([grad for grad, _ in used], weights, [v for _, v in used])[0])
        _check_sum(products[-1], sum((grad.detach() * v).sum() for grad, v in used))
    return torch.cat(products)


@contextlib.contextmanager
def _plain_kernels():
    """Kernels of which every operation has derivatives of all kinds: no fused recurrent cells, no flash attention."""
    backends = (torch.backends.mkldnn, torch.backends.cudnn)
    before = [b.enabled for b in backends]
    try:
        for b in backends:
            b.enabled = False
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        for b, enabled in zip(backends, before):
            b.enabled = enabled


@contextlib.contextmanager
def _scoring(agent, closure):
    """Evaluate `closure` with the agent in evaluation mode, eagerly and with gradients; then put everything back.

    Yields the closure to call. Where its calls drew random numbers or changed buffers, it must still give the same value
    twice, or there is no one function to differentiate: then ValueError.
    """
    modes = [(m, m.training) for m in agent.modules()]
    buffers = [(m, n, b, b.clone()) for m, _ in modes for n, b in m._buffers.items() if b is not None]
    devices = {p.device for p in agent.parameters() if p.is_cuda}
    calls = []

    def call(*args):
        calls[:] = calls or [args]
        return closure(*args)

    def rng():
        return [torch.get_rng_state(), *(torch.cuda.get_rng_state(d) for d in devices)]

    # compiled code has no forward mode, and hooks and swapped parameters would recompile it
    eager = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else contextlib.nullcontext()
    before = rng()
    try:
        for m, mode in modes:
            # cuDNN's recurrent kernels have a backward in training mode only, and without dropout the two modes are one
            m.training = mode and isinstance(m, nn.RNNBase) and m.dropout == 0
        with eager, torch.inference_mode(False), torch.enable_grad():
            yield call
            changed = any(m._buffers.get(n) is not b or not torch.equal(b, value) for m, n, b, value in buffers)
            if calls and (changed or not all(map(torch.equal, before, rng()))):
                with torch.no_grad():
                    if not torch.equal(closure(*calls[0]), closure(*calls[0])):
                        raise ValueError(
                            "the closure gives another value at each call (random numbers, or a buffer that it updates): make"
                            " it deterministic in evaluation mode, e.g. F.dropout(x, training=self.training), a stored action"
                        )
    finally:
        for m, mode in modes:
            m.training = mode
        for m, n, b, value in buffers:
            m._buffers[n] = b
            if not torch.equal(b, value):
                with torch.no_grad():
                    b.detach_().copy_(value)
        torch.set_rng_state(before[0])
        for device, state in zip(devices, before[1:]):
            torch.cuda.set_rng_state(state, device)


# ---- checks

_INDEPENDENT = (
    "the value does not depend on the trainable parameters of agent;"
    " does the closure run this very agent, outside torch.no_grad and without detach?"
)


def _agent_and_params(agent):
    agent = getattr(agent, "_orig_mod", agent)  # of a module from torch.compile: the module
    if not isinstance(agent, nn.Module):
        raise ValueError(f"agent must be a torch.nn.Module, got {_describe(agent)}")
    params = {name: p for name, p in agent.named_parameters() if p.requires_grad}
    if not params:
        raise ValueError("agent has no trainable parameters")
    return agent, params


def _chunks(num_records, chunk_size, halve=False):
    n = _positive("num_records", num_records)
    whole = max(512, (n + 1) // 2) if halve else n
    return torch.arange(n, device="cpu").split(whole if chunk_size is None else _positive("chunk_size", chunk_size))


def _positive(name, value):
    if isinstance(value, bool) or not isinstance(value, (int, float, np.number)) or value % 1 != 0 or value < 1:
        raise ValueError(f"{name} must be a positive integer, got {value}")
    return int(value)


def _vector(name, value, inds):
    if not isinstance(value, torch.Tensor) or value.shape != (len(inds),) or not value.is_floating_point():
        raise ValueError(f"{name}(inds) must return a float tensor of shape [{len(inds)}], got {_describe(value)}")
    return value


def _check_sum(products, total):
    """RuntimeError if products do not have the sum that is known otherwise: an operation has no second derivative, or another
    one in forward mode. The tolerance leaves room for TF32 and half precision."""
    error, scale = (products.sum() - total).abs(), products.abs().sum() + total.abs()
    if error > max(0.01, torch.finfo(products.dtype).eps ** 0.5) * scale:
        raise RuntimeError(
            f"an operation of the network has no consistent derivatives: the scores are {float(error / scale):.0%} off"
        )


def _check_finite(name, x):
    bad = (~torch.isfinite(x)).nonzero().flatten()
    if len(bad):
        raise ValueError(
            f"{name}: {len(bad)} of {len(x)} are not finite, the first at index {int(bad[0])} ({x[bad[0]].item()})"
        )


def _describe(value):
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(type(value).__name__)


def _ranks(x):
    """Ranks of x, equal values sharing their mean rank."""
    _, group, count = np.unique(x, return_inverse=True, return_counts=True)
    return (count.cumsum() - (count - 1) / 2)[group]
