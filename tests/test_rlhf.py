"""ppo_iif_rlhf.py: its arithmetic by hand, its scores against autograd on single unpadded records, real runs of a very small
model."""

import contextlib
import io
import json
import multiprocessing
import os
import runpy
import shutil
import signal
import socket
import sys
from pathlib import Path

import numpy as np
import offline_wandb
import pytest
import torch
import torch.distributed as dist
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
import huggingface_hub as hub  # noqa: E402
from huggingface_hub.utils import _http as hub_http  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402

import ppo_iif_rlhf as rlhf  # noqa: E402
from benchmarks.reproduce import rlhf_tiny  # noqa: E402

TESTS = Path(__file__).resolve().parent
SCRIPT = TESTS.parent / "ppo_iif_rlhf.py"
WORDS = (
    "<end> <unk> the a film plot is was and it good great love awful bad boring long of in some not actor scene why".split()
)
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["test_rlhf"])
torch.set_num_threads(1)


def gpt2(kind="GPT2LMHeadModel", **kwargs):
    config = transformers.GPT2Config(
        vocab_size=len(WORDS),
        n_positions=32,
        n_embd=16,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
        **kwargs,
    )
    torch.manual_seed(5)
    return getattr(transformers, kind)(config)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A language model, a classifier and texts."""
    folder = tmp_path_factory.mktemp("models")
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<end>", pad_token="<end>", unk_token="<unk>"
    )
    for name, kind in (("lm", "GPT2LMHeadModel"), ("classifier", "GPT2ForSequenceClassification")):
        gpt2(kind).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    rng = np.random.default_rng(1)
    (folder / "texts.txt").write_text("\n".join(" ".join(rng.choice(WORDS[2:], 8)) for _ in range(100)) + "\n\n")
    rows = [{"prompt": {"text": " ".join(rng.choice(WORDS[2:], 8)), "toxicity": x}} for x in [0.2, 0.5, None, 0.9] * 20]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def flags_of(folder):
    return (
        f"--no-cuda --model-name {folder}/lm --dataset-name {folder}/texts.txt --batch-size 16 --minibatch-size 2"
        " --total-timesteps 32 --max-response-tokens 6 --min-response-tokens 0 --min-prompt-tokens 2 --max-prompt-tokens 5"
    )


def run(flags, cwd, script=SCRIPT):
    """Run the script here, as __main__. Returns its message if it refused, what it printed, and the new run's folder."""
    before, out, message = set(Path(cwd).glob("runs/*")), io.StringIO(), None
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        patch.chdir(cwd)
        patch.setattr(sys, "argv", [str(script), *flags.split()])
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as error:
            message = error.code
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
    new = set(Path(cwd).glob("runs/*")) - before
    return message, out.getvalue(), new.pop() if new else None


def train(flags, cwd):
    message, out, folder = run(flags, cwd)
    assert message is None, message
    return out, folder


def scalars(folder):
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return {name: [(e.step, e.value) for e in events.Scalars(name)] for name in events.Tags()["scalars"]}


def values(folder, name):
    return [value for _, value in scalars(folder)[name]]


# ---- the arithmetic, by hand


def test_token_rewards_and_gae_with_padding():
    """Two responses, of three tokens and of one; whatever stands on the padding must not matter."""
    batch = {
        "mask": torch.tensor([[True, True, True], [True, False, False]]),
        "logprobs": torch.tensor([[-1.0, -2.0, -3.0], [-1.0, 9.0, 9.0]]),
        "ref_logprobs": torch.tensor([[-1.5, -2.0, -2.0], [-3.0, 7.0, 7.0]]),
        "values": torch.tensor([[0.5, 1.0, 2.0], [0.25, 8.0, 8.0]]),
        "rewards": torch.tensor([10.0, -1.0]),
    }
    done = rlhf.gae(batch, kl_coef=0.1, gamma=0.5, gae_lambda=0.5)
    # kl of the tokens: 0.5, 0, -1; and 2. deltas: -0.05 + 0.5 * 1 - 0.5; 0 + 0.5 * 2 - 1; 10.1 - 2; and -1.2 - 0.25
    torch.testing.assert_close(done["token_rewards"], torch.tensor([[-0.05, 0.0, 10.1], [-1.2, 0.0, 0.0]]))
    last, middle = 8.1, 0.25 * 8.1
    expected = torch.tensor([[-0.05 + 0.25 * middle, middle, last], [-1.45, 0.0, 0.0]])
    torch.testing.assert_close(done["advantages"], expected)
    torch.testing.assert_close(done["returns"], torch.tensor([[0.45 + 0.25 * middle, 1 + middle, 10.1], [-1.2, 0.0, 0.0]]))
    assert torch.equal(batch["values"][1], torch.tensor([0.25, 8.0, 8.0]))  # what it was given is not changed


def test_whitening_is_over_tokens_that_are_there():
    mask = torch.tensor([[True, True, False], [True, False, False]])
    done = rlhf.whiten({"mask": mask, "advantages": torch.tensor([[1.0, 2.0, 77.0], [6.0, 77.0, 77.0]])})["advantages"]
    deviation = 7**0.5  # mean 3; (4 + 1 + 9) / 2
    torch.testing.assert_close(done, torch.tensor([[-2.0, -1.0, 0.0], [3.0, 0.0, 0.0]]) / deviation)


def test_clipping_of_policy_and_value_losses():
    """Ratios 1.5 and 0.5 with advantages of both signs; values that moved by 0.5, towards the return and past it."""
    mask = torch.tensor([[True, True, True, True], [True, False, False, False]])
    ratios = torch.tensor([[1.5, 1.5, 0.5, 0.5], [1.1, 9.0, 9.0, 9.0]])
    batch = {name: torch.zeros(2, 4) for name in ("query", "query_mask", "response", "logprobs", "values")}
    batch |= {"mask": mask, "advantages": torch.tensor([[1.0, -1.0, 1.0, -1.0], [2.0, 0.0, 0.0, 0.0]])}
    batch["returns"] = torch.tensor([[1.0, 0.5, 0.0, -1.0], [0.0, 0.0, 0.0, 0.0]])
    newvalue = torch.tensor([[0.5, 0.5, 0.5, 0.5], [0.1, 5.0, 5.0, 5.0]])
    args = rlhf.Args(clip_coef=0.2, clip_vloss=True)
    loss, parts, ratio = rlhf.record_losses(lambda *_: (ratios.log(), newvalue), batch, torch.arange(2), args)
    policy, value = parts["policy_loss"], parts["value_loss"]
    # max(-A r, -A clamp(r)): -1.2, 1.5, -0.5, 0.8; and -2.2
    torch.testing.assert_close(policy, torch.tensor([(-1.2 + 1.5 - 0.5 + 0.8) / 4, -2.2]))
    # the larger of (0.5 - R)^2 and (0.2 - R)^2: 0.64, 0.09, 0.25, 2.25; and 0.01
    torch.testing.assert_close(value, torch.tensor([(0.64 + 0.09 + 0.25 + 2.25) / 4, 0.01]))
    torch.testing.assert_close(loss, policy + 0.05 * value)
    assert torch.equal(ratio[1, 1:], torch.ones(3))
    args.clip_vloss = False
    _, parts, _ = rlhf.record_losses(lambda *_: (ratios.log(), newvalue), batch, torch.arange(2), args)
    torch.testing.assert_close(parts["value_loss"][0], torch.tensor((0.25 + 0 + 0.25 + 2.25) / 4))


def test_advantages_of_groups():
    """Rewards 1, 3 and 2, 2.5 less their groups' means; three times 0.1, whose mean is not 0.1 as float32 has it, are no difference."""
    mask = torch.tensor([[True, True]] * 3 + [[True, False]])
    batch = {"rewards": torch.tensor([1.0, 3.0, 2.0, 2.5]), "mask": mask}
    done = rlhf.grpo(batch, 0.3, 2)
    first, second = 1 / (2**0.5 + 1e-4), 0.25 / (0.125**0.5 + 1e-4)
    expected = torch.tensor([[-first, -first], [first, first], [-second, -second], [second, 0.0]])
    torch.testing.assert_close(done["advantages"], expected)
    torch.testing.assert_close(done["kl_coef"], torch.full((4,), 0.3))
    unscaled = rlhf.grpo(batch, 0.3, 2, scaled=False)["advantages"]
    torch.testing.assert_close(unscaled, torch.tensor([[-1.0, -1.0], [1.0, 1.0], [-0.25, -0.25], [0.25, 0.0]]))
    alike = {"rewards": torch.tensor([0.1] * 3 + [0.0, 0.1, 0.1]), "mask": torch.ones(6, 2, dtype=torch.bool)}
    done = rlhf.grpo(alike, 0.3, 3)["advantages"]
    assert not done[:3].any() and done[3:].all()


def test_the_kl_penalty_of_grpo_is_in_the_loss():
    """pi_ref / pi of 2, 1/2 and 1: 2 - log 2 - 1, 1/2 + log 2 - 1 and 0; the policy loss as with PPO."""
    batch = {name: torch.zeros(1, 4) for name in ("query", "query_mask", "response", "logprobs")}
    batch |= {"mask": torch.tensor([[True, True, True, False]]), "kl_coef": torch.tensor([0.5])}
    batch |= {"advantages": torch.tensor([[2.0, 2.0, 2.0, 0.0]]), "ref_logprobs": torch.tensor([[2.0, 0.5, 1.1, 1.0]]).log()}
    newlogprob = torch.tensor([[1.0, 1.0, 1.1, 1e-30]]).log()
    args = rlhf.Args(advantage="grpo")
    loss, parts, _ = rlhf.record_losses(lambda *_: (newlogprob, None), batch, torch.arange(1), args)
    torch.testing.assert_close(parts["kl_loss"], torch.tensor([0.5 / 3]))
    torch.testing.assert_close(parts["policy_loss"], torch.tensor([-2 * 3.1 / 3]))
    torch.testing.assert_close(loss, torch.tensor([-6.2 / 3 + 0.25 / 3]))


def test_the_kl_controller():
    args = rlhf.Args(batch_size=100, kl_target=6.0, kl_horizon=10_000)
    assert rlhf.next_kl_coef(0.04, 6.6, args) == pytest.approx(0.04 * (1 + 0.1 * 0.01))
    assert rlhf.next_kl_coef(0.04, 600.0, args) == pytest.approx(0.04 * (1 + 0.2 * 0.01))
    assert rlhf.next_kl_coef(0.04, -3.0, args) == pytest.approx(0.04 * (1 - 0.2 * 0.01))
    args.adaptive_kl = False
    assert rlhf.next_kl_coef(0.04, 600.0, args) == 0.04


def test_what_each_filter_keeps():
    batch = {"scores": torch.tensor([-1.0, 2, -3, 4, -5, 6]), "rewards": torch.tensor([3.0, 1, 2, 9, 5, 4])}
    for name, kept in (("influence", [1, 3, 5]), ("reward", [0, 2, 5])):  # one of the lowest rewards goes, two of the highest
        args = rlhf.Args(batch_size=6, filter=name)
        assert rlhf.select(batch, args, torch.Generator()).tolist() == kept
    args = rlhf.Args(batch_size=6, filter="random")
    kept = rlhf.select(batch, args, torch.Generator().manual_seed(0))
    assert len(kept) == 3 and torch.equal(kept, kept.unique())


# ---- a round of unequal lengths


def make_agent(lora=False):
    lm = gpt2(attn_implementation="eager")
    if lora:
        lm = peft.get_peft_model(lm, peft.LoraConfig(task_type="CAUSAL_LM", r=2, lora_alpha=4, lora_dropout=0.5))
        torch.manual_seed(6)
        for name, p in lm.named_parameters():
            if "lora_B" in name:  # else they are zero, and so is the gradient of A
                torch.nn.init.normal_(p, std=0.3)
    agent = rlhf.Agent(lm).double().eval()
    torch.nn.init.normal_(agent.value_head.weight)
    return agent


def make_round(agent, args, n=6):
    """Left-padded prompts and right-padded responses of unequal length, with rewards; gathered, whitened."""
    generator = torch.Generator().manual_seed(7)
    prompt_lengths, response_lengths = torch.arange(n) % 4 + 1, torch.arange(n) % 3 * 2 + 1
    batch = {
        "query": torch.randint(2, len(WORDS), (n, 4), generator=generator),
        "query_mask": torch.arange(4) >= 4 - prompt_lengths[:, None],
        "response": torch.randint(2, len(WORDS), (n, 5), generator=generator),
        "mask": torch.arange(5) < response_lengths[:, None],
        "rewards": torch.randn(n, generator=generator, dtype=torch.double),
    }
    batch["logprobs"], batch["values"] = rlhf.evaluate_tokens(agent, batch, args)
    batch["ref_logprobs"] = batch["logprobs"] - 0.1
    return rlhf.whiten(rlhf.gae(batch, 0.04, 1.0, 0.95))


def alone(agent, batch, i):
    """log-probs and values [length] of record i from its tokens alone: no padding, no batch, no arithmetic of the script."""
    query, response = batch["query"][i][batch["query_mask"][i]], batch["response"][i][batch["mask"][i]]
    out = agent.lm(input_ids=torch.cat([query, response])[None], output_hidden_states=True)
    states = slice(len(query) - 1, len(query) + len(response) - 1)
    logprobs = out.logits[0, states].log_softmax(-1)[range(len(response)), response]
    return logprobs, (out.hidden_states[-1][0, states] @ agent.value_head.weight.T + agent.value_head.bias).squeeze(-1)


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize(
    "target, record_loss", [("seq", "policy"), ("return", "policy"), ("seq_kl", "policy"), ("seq", "ppo")]
)
def test_scores_against_a_loop_of_autograd(lora, target, record_loss):
    agent = make_agent(lora)
    args = rlhf.Args(batch_size=6, target=target, record_loss=record_loss, score_chunk=4, vf_coef=0.3)
    batch, validation = make_round(agent, args), None
    if target == "return":  # on fresh records
        validation = {name: x[torch.tensor([3, 1, 2, 5])] for name, x in make_round(agent, args).items()}
    params = [p for p in agent.parameters() if p.requires_grad]

    def gradient(value):
        grads = torch.autograd.grad(value, params, allow_unused=True)
        return torch.cat([torch.zeros(p.numel()) if g is None else g.flatten() for g, p in zip(grads, params)])

    valid = batch if validation is None else validation
    whole = torch.stack([rewards[there].sum() for rewards, there in zip(valid["token_rewards"], valid["mask"])])
    whole = whole - valid["values"][:, 0]
    whole = (whole - whole.mean()) / whole.std()
    value = 0
    for i in range(len(valid["mask"])):
        logprobs, _ = alone(agent, valid, i)
        advantages = valid["advantages"][i][: len(logprobs)]
        value += {
            "seq": logprobs.sum() * advantages[-1] / 6,
            "seq_kl": logprobs.sum() * whole[i] / 6,
            "return": (logprobs * advantages).sum() / valid["mask"].sum(),
        }[target]
    direction = gradient(value)
    expected = []
    for i in range(6):
        logprobs, newvalue = alone(agent, batch, i)
        advantages, returns = (batch[name][i][: len(logprobs)] for name in ("advantages", "returns"))
        loss = -(advantages * (logprobs - logprobs.detach()).exp()).mean()
        if record_loss == "ppo":
            loss = loss + 0.3 * (newvalue - returns).square().mean()
        expected.append(-gradient(loss) @ direction)
    scores = rlhf.score(agent, batch, args, validation)
    torch.testing.assert_close(scores, torch.stack(expected), rtol=1e-6, atol=1e-9)
    assert (scores < 0).any() and (scores > 0).any()
    assert not agent.training and all(p.grad is None for p in params)


@pytest.mark.parametrize(
    "target, record_loss, fresh", [("seq", "policy", False), ("seq", "ppo", True), ("seq_kl", "policy", True)]
)
def test_scores_of_grpo_against_a_loop_of_autograd(target, record_loss, fresh):
    """Two groups of three answers; those of the second have one reward, so that only their KL penalty can teach anything."""
    agent = make_agent()
    agent.value_head = None
    args = rlhf.Args(batch_size=6, advantage="grpo", group_size=3, target=target, record_loss=record_loss, score_chunk=4)

    def collected(order):
        batch = {name: x[order] for name, x in make_round(agent, args).items()}
        batch = {name: batch[name] for name in (*rlhf.READ, "logprobs", "rewards")}
        batch["rewards"][3:] = 0.1
        generator = torch.Generator().manual_seed(8)
        noise = torch.randn(batch["logprobs"].shape, generator=generator, dtype=torch.double)
        kl = -0.5 * (noise * batch["mask"]).sum(1)
        return rlhf.grpo(batch | {"ref_logprobs": batch["logprobs"] + 0.5 * noise, "kl": kl}, 0.2, 3)

    batch = collected(torch.arange(6))
    valid = collected(torch.tensor([4, 1, 3, 5, 2, 0])) if fresh else batch
    params = list(agent.parameters())

    def gradient(value):
        return torch.cat([g.flatten() for g in torch.autograd.grad(value, params)])

    def logratio(rounds, i):
        logprobs, _ = alone(agent, rounds, i)
        return rounds["ref_logprobs"][i][: len(logprobs)] - logprobs, logprobs

    agent.value_head = torch.nn.Linear(16, 1).double()  # that the function `alone` has one to look at
    kls = [-logratio(valid, i)[0].sum().detach() for i in range(6)]
    value = 0
    for i in range(6):
        group = range(3) if i < 3 else range(3, 6)
        rewards = valid["rewards"][group.start : group.stop]
        weight = 0.0 if i >= 3 else (rewards[i] - rewards.mean()) / (rewards.std() + 1e-4)
        if target == "seq_kl":
            weight = weight - 0.2 * (kls[i] - sum(kls[j] for j in group) / 3)
        value = value + weight * alone(agent, valid, i)[0].sum() / 6
    direction, expected = gradient(value), []
    for i in range(6):
        ratio, logprobs = logratio(batch, i)
        loss = -(batch["advantages"][i, 0] * (logprobs - logprobs.detach()).exp()).mean()
        if record_loss == "ppo":
            loss = loss + 0.2 * (ratio.exp() - ratio - 1).mean()
        expected.append(-gradient(loss) @ direction)
    agent.value_head = None
    scores = rlhf.score(agent, batch, args, valid if fresh else None)
    torch.testing.assert_close(scores, torch.stack(expected), rtol=1e-6, atol=1e-9)
    assert (scores[:3] != 0).all() and (scores[3:] == 0).all() == (record_loss == "policy")
    if record_loss == "policy":  # what teaches nothing is not harmful
        assert set(range(3, 6)) < set(rlhf.select({"scores": scores}, args, None).tolist())


@pytest.mark.parametrize("advantage", ["gae", "grpo"])
def test_ways_that_save_memory_change_nothing(advantage, folder):
    """Micro-batches, layers computed again and another attention: the same scores and the same update."""
    ends = []
    for more in ({}, {"micro_batch_size": 1}, {"gradient_checkpointing": True}, {"attn_implementation": "sdpa"}):
        given = {"model_name": f"{folder}/lm", "batch_size": 6, "minibatch_size": 3, "score_chunk": 4, "advantage": advantage}
        args = rlhf.Args(**given, **more)
        agent = rlhf.make_agent(args, "cpu")[0].double()
        batch = make_round(agent, args)
        if advantage == "grpo":
            assert agent.value_head is None
            batch = rlhf.grpo({name: x for name, x in batch.items() if name not in ("advantages", "returns")}, 0.2, 3)
        scores = rlhf.score(agent, batch, args)
        optimizer = torch.optim.SGD(agent.parameters(), 0.1)
        losses, steps = rlhf.update(agent, optimizer, batch, torch.arange(6), args, torch.Generator().manual_seed(2))
        assert steps == 8
        ends.append((scores, torch.cat([p.detach().flatten() for p in agent.parameters()]), torch.tensor([*losses.values()])))
    for other in ends[1:]:
        for mine, its in zip(ends[0], other):
            torch.testing.assert_close(mine, its, rtol=1e-6, atol=1e-9)


def test_bfloat16_ranks_records_as_float32_does(folder):
    """Of the same weights, as bfloat16 has them, and one round: ranks and most signs agree, not the digits."""
    scores, batch = [], None
    for dtype in ("float32", "bfloat16"):
        args = rlhf.Args(model_name=f"{folder}/lm", batch_size=24, dtype=dtype)
        agent = rlhf.make_agent(args, "cpu")[0]
        for p in agent.lm.parameters():
            p.data = p.data.bfloat16().to(getattr(torch, dtype))
        batch = batch or make_round(agent, args, 24)
        scores.append(rlhf.score(agent, {k: x.float() if x.is_floating_point() else x for k, x in batch.items()}, args))
    ranks = [x.argsort().argsort().float() for x in scores]
    assert torch.corrcoef(torch.stack(ranks))[0, 1] > 0.95 and (scores[0].sign() == scores[1].sign()).float().mean() > 0.9
    assert not torch.allclose(*scores, rtol=1e-3)


def test_the_temperature_is_part_of_the_policy(folder):
    args = rlhf.Args(model_name=f"{folder}/lm", batch_size=6, temperature=0.5)
    agent = rlhf.make_agent(args, "cpu")[0].double()
    batch = make_round(agent, args)
    query, response = batch["query"][3][batch["query_mask"][3]], batch["response"][3][batch["mask"][3]]
    logits = agent.lm(input_ids=torch.cat([query, response])[None]).logits[0, len(query) - 1 : -1] / 0.5
    expected = logits.log_softmax(-1)[range(len(response)), response]
    torch.testing.assert_close(batch["logprobs"][3][: len(response)], expected)
    many = batch["query"][3].repeat(3000, 1), batch["query_mask"][3].repeat(3000, 1)
    sampled, _ = rlhf.generate(agent, *many, 0, rlhf.Args(max_response_tokens=1, min_response_tokens=0), torch.Generator())
    seen = torch.bincount(sampled[:, 0], minlength=len(WORDS)) / 3000
    assert (seen - logits[0].softmax(-1)).abs().max() < 5 * (0.25 / 3000) ** 0.5


def small(kind, folder, **kwargs):
    """A model of another architecture, with the tokenizer of the others."""
    shutil.copytree(folder / "lm", folder / kind, dirs_exist_ok=True)
    sizes = {"vocab_size": len(WORDS), "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    ends = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "max_position_embeddings": 32}
    torch.manual_seed(3)
    getattr(transformers, f"{kind}ForCausalLM")(
        getattr(transformers, f"{kind}Config")(**sizes, **ends, **kwargs)
    ).save_pretrained(folder / kind)


@pytest.mark.parametrize(
    "kind, more, lora",
    [
        ("OPT", {"word_embed_proj_dim": 4, "ffn_dim": 8}, 0),
        ("OPT", {"word_embed_proj_dim": 16, "ffn_dim": 8}, 2),
        ("Mixtral", {"intermediate_size": 8, "num_local_experts": 2, "num_key_value_heads": 2}, 2),
        ("Qwen3Moe", {"moe_intermediate_size": 8, "num_experts": 2, "num_experts_per_tok": 1, "num_key_value_heads": 2}, 2),
    ],
)
def test_architectures(kind, more, lora, folder, tmp_path):
    small(kind, folder, **more)
    flags = f"{flags_of(folder)} --model-name {folder}/{kind} --lora-r {lora} --total-timesteps 16 --save-model"
    _, done = train(flags, tmp_path)
    assert np.isfinite(values(done, "influence/score_std")).all() and values(done, "influence/score_std")[0] > 0


def test_a_saved_adapter_begins_another_run(folder, tmp_path):
    """Its first round is of the policy that the adapter is: the reference is it, too."""
    flags = f"{flags_of(folder)} --lora-r 2 --learning-rate 0.1 --save-model"
    _, done = train(flags, tmp_path)
    agent, _, _ = rlhf.make_agent(rlhf.Args(model_name=f"{done}/model", max_prompt_tokens=5, max_response_tokens=6), "cpu")
    saved = torch.load(done / "ppo_iif_rlhf.cleanrl_model")["agent"]
    first, _, _ = rlhf.make_agent(rlhf.Args(model_name=f"{folder}/lm", lora_r=2), "cpu")
    before = first.lm(input_ids=torch.tensor([[3, 4]])).logits
    first.load_state_dict(saved, strict=False)
    ids = torch.tensor([[3, 4]])
    torch.testing.assert_close(agent.lm(input_ids=ids).logits, first.lm(input_ids=ids).logits, rtol=1e-4, atol=1e-5)
    assert (before - agent.lm(input_ids=ids).logits).abs().max() > 1e-3
    _, again = train(f"{flags} --model-name {done}/model --total-timesteps 16", tmp_path)
    assert values(again, "rlhf/kl")[0] == pytest.approx(0, abs=1e-5)


def test_generated_tokens_have_the_probabilities_of_the_policy(folder):
    """Responses end where they say, and repeat with the seed; first tokens come as often as the policy says."""
    agent = make_agent().float()
    args = rlhf.Args(max_response_tokens=5, min_response_tokens=2)
    query = torch.tensor([[0, 0, 7, 3]] * 4000)
    query_mask = torch.tensor([[False, False, True, True]] * 4000)
    response, mask = rlhf.generate(agent, query, query_mask, 0, args, torch.Generator().manual_seed(1))
    again = rlhf.generate(agent, query, query_mask, 0, args, torch.Generator().manual_seed(1))
    assert torch.equal(response, again[0]) and torch.equal(mask, again[1])
    lengths = mask.sum(1)
    assert lengths.min() == 3 and lengths.max() == 5  # no end among the first two
    ended = (response == 0) & mask
    assert torch.equal(ended.any(1) | (lengths == 5), torch.ones(4000, dtype=torch.bool))
    assert torch.equal(ended.sum(1)[ended.any(1)], torch.ones(int(ended.any(1).sum()), dtype=torch.long))
    with torch.no_grad():
        logits = agent.lm(input_ids=torch.tensor([[7, 3]])).logits[0, -1]
    logits[0] = -torch.inf
    expected = logits.softmax(-1)
    seen = torch.bincount(response[:, 0], minlength=len(WORDS)) / 4000
    assert (seen - expected).abs().max() < 5 * (0.25 / 4000) ** 0.5


def joined(rank, size, port, target, *given):
    """Be a process of a group, as torchrun starts them."""
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size}
    os.environ.update({name: str(value) for name, value in where.items()} if size > 1 else {})
    target(rank, *given)


def in_processes(size, target, *given):
    """target(rank, *given) in processes that are forked from one which has imported everything, once for all tests."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [FORKS.Process(target=joined, args=(rank, size, port, target, *given)) for rank in range(size)]
    with pytest.MonkeyPatch.context() as patch:  # where the first of all looks for what it is to import
        patch.setenv("PYTHONPATH", os.pathsep.join(map(str, (SCRIPT.parent, TESTS))))
        for process in processes:
            process.start()
    for process in processes:
        process.join(120)
        process.kill()
    assert [process.exitcode for process in processes] == [0] * size


def train_in_share(rank, given, rounds, file):
    """A share of the round each, put together."""
    dist.init_process_group("gloo")
    args, mine = rlhf.Args(**given), torch.load(rounds)
    batch = {name: rlhf.gather(x[rlhf.share(6)]) for name, x in mine.items()}
    batch = rlhf.whiten(rlhf.gae(batch, 0.04, 1.0, 0.95))
    agent = make_agent(True)
    batch["scores"] = rlhf.score(agent, batch, args)
    kept = rlhf.select(batch, args, torch.Generator().manual_seed(1))
    params = [p for p in agent.parameters() if p.requires_grad]
    rlhf.update(agent, torch.optim.SGD(params, 0.1), batch, kept, args, torch.Generator().manual_seed(2))
    torch.save({"scores": batch["scores"], "kept": kept, "params": params}, f"{file}{rank}")
    with torch.no_grad():
        batch["advantages"][5] *= torch.inf  # of the share of the second process
    with pytest.raises(ValueError, match="scores: 1 of 3 are not finite, the first at index 2.* process 1"):
        rlhf.score(agent, batch, args, validation={name: x[:2] for name, x in batch.items()})
    dist.destroy_process_group()


def test_two_processes_drop_and_learn_what_one_does(tmp_path):
    """One saved round, shared by two processes: of its kept records, an odd number, one process gets more than the other."""
    agent, file = make_agent(True), str(tmp_path / "round.pt")
    given = {"batch_size": 6, "minibatch_size": 2, "update_epochs": 2, "score_chunk": 2}
    given |= {"filter_percent": 40.0, "filter_of": "all"}
    args = rlhf.Args(**given)
    batch = make_round(agent, args)
    torch.save({k: x for k, x in batch.items() if k not in ("advantages", "returns", "token_rewards")}, file)
    in_processes(2, train_in_share, given, file, file)
    batch["scores"] = rlhf.score(agent, batch, args)
    kept = rlhf.select(batch, args, torch.Generator().manual_seed(1))
    assert len(kept) == 4
    params = [p for p in agent.parameters() if p.requires_grad]
    before = [p.detach().clone() for p in params]
    rlhf.update(agent, torch.optim.SGD(params, 0.1), batch, kept, args, torch.Generator().manual_seed(2))
    assert all((p - q).abs().max() > 1e-6 for p, q in zip(params, before))
    for rank in (0, 1):
        other = torch.load(file + str(rank))
        assert torch.equal(other["kept"], kept)
        torch.testing.assert_close(other["scores"], batch["scores"])
        for p, q in zip(other["params"], params):
            torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)


def train_in_process(rank, flags, cwd, variables):
    os.environ.update(variables)
    train(flags, cwd)


@pytest.mark.parametrize("more", ["", "--advantage grpo --group-size 4 --target seq_kl"])
def test_a_run_of_two_processes(more, folder, tmp_path):
    flags = f"{flags_of(folder)} --validation-prompts 8 --eval-prompts 4 --save-model {more}"
    in_processes(2, train_in_process, flags, tmp_path, {})
    (path,) = tmp_path.glob("runs/*")
    assert [step for step, _ in scalars(path)["rlhf/reward"]] == [16, 32] and len(values(path, "eval/reward")) == 3
    assert torch.load(path / "ppo_iif_rlhf.cleanrl_model")["iteration"] == 2


def grpo_in_share(rank, folder, file):
    """Groups of 8 answers of which each process gives 4."""
    dist.init_process_group("gloo")
    args = rlhf.Args(model_name=f"{folder}/lm", dataset_name=f"{folder}/texts.txt", advantage="grpo", batch_size=8)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "lm")
    prompts = rlhf.draw_prompts(tokenizer, rlhf.load_texts("", args.dataset_name), 8, args, 10, 0)
    rewards = rlhf.gather(torch.arange(4.0) + 4 * rank)
    done = rlhf.grpo({"rewards": rewards, "mask": torch.ones(8, 1, dtype=torch.bool)}, 0.1, args.group_size, scaled=False)
    torch.save((prompts, done["advantages"]), f"{file}{rank}")
    dist.destroy_process_group()


def test_a_group_may_be_of_two_processes(folder, tmp_path):
    in_processes(2, grpo_in_share, folder, str(tmp_path / "part"))
    (first, advantages), (second, same) = (torch.load(tmp_path / f"part{rank}") for rank in (0, 1))
    assert first == second == [first[0]] * 4
    assert torch.equal(advantages, same) and torch.equal(advantages[:, 0], torch.arange(8) - 3.5)


# ---- runs


ARMS = ("influence", "random", "reward", "none", "toy_filters:nothing", "toy_filters:weights")


@pytest.mark.parametrize("arm", ARMS)
def test_a_run_of_each_arm(arm, folder, tmp_path):
    more = "--eval-prompts 8 --eval-model-name {0}/classifier --lora-r 2" if arm == "random" else ""
    more = "--validation-prompts 8 --target return --record-loss ppo" if arm == "reward" else more.format(folder)
    _, done = train(f"{flags_of(folder)} --filter {arm} {more}", tmp_path)
    rows = scalars(done)
    steps = [16, 32]
    for name in (
        "rlhf/reward",
        "rlhf/kl",
        "rlhf/kl_coef",
        "rlhf/response_length",
        "time/rollout",
        "time/update",
        "charts/round",
    ):
        assert [step for step, _ in rows[name]] == steps, name
    assert rows["rlhf/kl"][0][1] == pytest.approx(0, abs=1e-5) and rows["rlhf/kl"][1][1] != 0 or arm == "toy_filters:nothing"
    assert ("influence/negative_fraction" in rows) == (arm != "none")
    skipped, optimizer_steps = (values(done, f"charts/{name}")[-1] for name in ("skipped_updates", "optimizer_steps"))
    assert (skipped, optimizer_steps == 0) == ((2, True) if arm == "toy_filters:nothing" else (0, False))
    if arm == "none":
        assert optimizer_steps == 2 * 4 * 8
    elif arm in ("influence", "random", "reward"):
        kept, negative = values(done, "influence/records_kept"), values(done, "influence/negative_fraction")
        assert kept == [16 - 16 * x for x in negative]
        assert optimizer_steps == sum(4 * max(int(k) // 2, 1) for k in kept)
    if arm == "random":
        assert [step for step, _ in rows["eval/reward"]] == [0, *steps]
        assert all(0 < x < 1 for x in values(done, "eval/classifier"))


@pytest.mark.parametrize("more", ["", "--validation-prompts 8 --target seq_kl --micro-batch-size 1 --record-loss ppo"])
def test_a_run_of_grpo(more, folder, tmp_path):
    """Cut and resumed, it ends like one that never stopped."""
    flags = f"{flags_of(folder)} --advantage grpo --group-size 4 --save-every 1 --save-model --filter influence {more}"
    _, whole = train(f"{flags} --total-timesteps 48", tmp_path)
    _, cut = train(f"{flags} --total-timesteps 32", tmp_path)
    assert run(f"--resume {cut}/checkpoint.pt --total-timesteps 48", tmp_path)[0] is None
    ends = [torch.load(path / "ppo_iif_rlhf.cleanrl_model")["agent"] for path in (whole, cut)]
    assert all(torch.equal(p, ends[1][name]) for name, p in ends[0].items()) and not any("value" in name for name in ends[0])
    rows = scalars(whole)
    assert rows["losses/kl_loss"][1][1] > 0 and not {"losses/value_loss", "losses/explained_variance"} & rows.keys()
    assert 0 < values(whole, "influence/negative_fraction")[0] < 1
    text = EventAccumulator(str(whole)).Reload().Tensors("samples/text_summary")[0]
    prompts = [row.split("|")[5] for row in text.tensor_proto.string_val[0].decode().split("\n")[2:]]
    assert len(prompts) == 16 and all(prompts.count(prompt) % 4 == 0 for prompt in prompts)


def test_a_round_of_grpo_without_differences_teaches_only_the_penalty(folder, tmp_path):
    flags = f"{flags_of(folder)} --advantage grpo --group-size 4 --reward toy_rewards:of_prompts --filter-of all"
    _, done = train(flags, tmp_path)
    assert values(done, "rlhf/equal_groups") == [1, 1] and values(done, "influence/records_kept") == [16, 16]
    assert values(done, "losses/policy_loss") == [0, 0] and np.isfinite(values(done, "losses/kl_loss")).all()


def test_the_first_round_is_the_same_in_every_arm_and_a_run_repeats(folder, tmp_path):
    runs = [scalars(train(f"{flags_of(folder)} --filter {arm}", tmp_path)[1]) for arm in ("influence", "influence", "none")]
    first, again = ({k: str(v) for k, v in rows.items() if "time/" not in k and k != "charts/SPS"} for rows in runs[:2])
    assert first == again
    assert runs[0]["rlhf/reward"][0] == runs[2]["rlhf/reward"][0] and runs[0]["rlhf/entropy"][0] == runs[2]["rlhf/entropy"][0]


def test_the_reward_rises_and_the_text_shows_it(folder, tmp_path):
    flags = "--total-timesteps 640 --batch-size 32 --minibatch-size 4 --learning-rate 3e-2 --kl-coef 0.01 --no-adaptive-kl --save-model"
    out, done = train(f"{flags_of(folder)} {flags}", tmp_path)
    reward = values(done, "rlhf/reward")
    assert np.mean(reward[-3:]) > np.mean(reward[:3]) + 0.3
    lm = transformers.AutoModelForCausalLM.from_pretrained(done / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(done / "model")
    inputs = tokenizer(["the film is"] * 100, return_tensors="pt")
    torch.manual_seed(0)
    answers = tokenizer.batch_decode(lm.generate(**inputs, do_sample=True, top_k=0, max_new_tokens=6)[:, 3:])
    counts = [
        sum(word in answer.split() for answer in answers for word in words)
        for words in (["good", "great", "love"], ["awful", "bad"])
    ]
    assert counts[0] > 3 * counts[1]


@pytest.mark.parametrize("lora", ["", "--lora-r 2 --dropout"])
def test_a_resumed_run_ends_like_one_that_never_stopped(lora, folder, tmp_path):
    flags = f"{flags_of(folder)} --save-every 1 --save-model {lora}"
    _, whole = train(f"{flags} --total-timesteps 48", tmp_path)
    _, cut = train(f"{flags} --total-timesteps 32", tmp_path)
    message, _, _ = run(f"--resume {cut}/checkpoint.pt --total-timesteps 48", tmp_path)
    assert message is None
    ends = [torch.load(path / "ppo_iif_rlhf.cleanrl_model") for path in (whole, cut)]
    assert ends[0]["iteration"] == ends[1]["iteration"] == 3 and ends[0]["kl_coef"] == ends[1]["kl_coef"]
    for name, p in ends[0]["agent"].items():
        assert torch.equal(p, ends[1]["agent"][name]), name
    assert all("lora" in name or "value_head" in name for name in ends[0]["agent"]) == bool(lora)
    assert scalars(whole)["rlhf/reward"] == scalars(cut)["rlhf/reward"]
    message, _, _ = run(f"--resume {cut}/checkpoint.pt --total-timesteps 64 --kl-coef 1", tmp_path)
    assert "--kl-coef 0.04" in message


def test_a_table_of_samples_in_wandb(folder, tmp_path):
    variables = {f"WANDB_{name}_DIR": str(tmp_path) for name in ("CACHE", "CONFIG", "DATA", "ARTIFACT")}
    variables |= {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_DIR": str(tmp_path)}
    in_processes(1, train_in_process, f"{flags_of(folder)} --track --batch-size 32", tmp_path, variables)
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    assert any("influence/scores/values" in row and "rlhf/kl" in row for row in offline_wandb.history(file))
    (path,) = tmp_path.glob("wandb/offline-run-*/files/media/table/samples*.json")
    table = json.loads(path.read_text())
    assert table["columns"] == ["influence", "reward", "kl", "kept", "prompt", "response"]
    influence = [row[0] for row in table["data"]]
    assert influence[:8] == sorted(influence[:8]) and influence[8:] == sorted(influence[8:], reverse=True)
    assert influence[0] < 0 < influence[8] and len(influence) == 16
    assert [row[3] for row in table["data"]] == [x >= 0 for x in influence]


def test_the_small_models_are_built_from_reviews(tmp_path, monkeypatch):
    texts = [f"The {'best' if i % 2 else 'worst'} film of {1900 + i}, isn't it?\u2028" for i in range(64)]
    monkeypatch.setattr(rlhf_tiny, "reviews", lambda: (texts, [i % 2 for i in range(64)]))
    rlhf_tiny.build(str(tmp_path / "tiny"))
    rlhf_tiny.build(str(tmp_path / "tiny"))  # another run was faster
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]
    rlhf_tiny.write_texts(tmp_path / "reviews.jsonl")
    monkeypatch.setattr(rlhf, "TINY", tmp_path / "tiny")
    monkeypatch.setattr(rlhf, "REVIEWS", tmp_path / "reviews.jsonl")
    assert rlhf.load_texts("--dataset-name", "reviews") == texts
    _, _, tokenizer = rlhf.make_agent(rlhf.Args(), "cpu")
    words = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("The best film", "why")]
    ids, mask = rlhf.pad(tokenizer, words, "cpu", 5)
    assert rlhf.decode(tokenizer, ids, mask) == ["the best film", ""]  # "why" is not among the words
    assert mask.tolist() == [[False] * 2 + [True] * 3, [False] * 4 + [True]]
    classify = rlhf.make_classifier("--reward-model-name", "tiny", 1, "cpu", probability=True)
    assert classify(["a"] * 3, ["the best film", "", "why"]).shape == (3,)


@pytest.mark.parametrize("flag, default", [("--model-name", "tiny"), ("--dataset-name", "reviews")])
def test_without_their_builder_the_defaults_are_refused(flag, default, folder, tmp_path):
    """As of a script that was copied with iif_core.py alone."""
    for name in ("ppo_iif_rlhf.py", "iif_core.py"):
        shutil.copy(SCRIPT.parent / name, tmp_path)
    given = flags_of(folder).replace(f"{flag} {folder}/{'lm' if default == 'tiny' else 'texts.txt'}", f"{flag} {default}")
    message, _, done = run(given, tmp_path, tmp_path / "ppo_iif_rlhf.py")
    assert "tiny and reviews, the defaults, are built by benchmarks.reproduce.rlhf_tiny" in message and done is None


def test_the_papers_command_with_stand_ins(folder, tmp_path):
    """As in docs/language-models.md, each model and text replaced by a small one; two rounds, and one prompt too long."""
    page = (SCRIPT.parent / "docs" / "language-models.md").read_text()
    command = next(part for part in page.split("```") if "gpt-neo-2.7B" in part and "ppo_iif_rlhf.py" in part)
    given = command.split("ppo_iif_rlhf.py", 1)[1].replace("\\\n", " ")
    (tmp_path / "comments.jsonl").write_text('{"text": "it was bad"}\n' + json.dumps({"text": "a bad film " * 300}))
    stand_ins = {
        "EleutherAI/gpt-neo-2.7B": f"{folder}/lm",
        "allenai/real-toxicity-prompts": f"{folder}/prompts.jsonl",
        "prompt.text+continuation.text": "prompt.text+prompt.text+prompt.text",
        "facebook/roberta-hate-speech-dynabench-r4-target": f"{folder}/classifier",
        "alexandrainst/da-hatespeech-detection-base": f"{folder}/classifier",
        "wiki_toxic_test.jsonl": f"{tmp_path}/comments.jsonl",
        "--max-prompt-tokens 14": "--max-prompt-tokens 3",
        "--min-prompt-tokens 10": "--min-prompt-tokens 2",
        "--batch-size 256": "--batch-size 8",
        "--validation-prompts 1024": "--validation-prompts 8",
        "--eval-prompts 400": "--eval-prompts 2",
        "--total-timesteps 27904": "--total-timesteps 16",
        "bfloat16": "float32",
    }
    for theirs, ours in stand_ins.items():
        assert theirs in given
        given = given.replace(theirs, ours)
    out, done = train(f"--no-cuda {given}", tmp_path)
    assert len(values(done, "rlhf/reward")) == 2 and len(values(done, "eval/classifier")) == 3
    assert "1 of 2 prompts are longer than the context: their last 3 tokens" in out


def test_a_reward_of_prompt_and_response_and_a_missing_end(folder, tmp_path):
    """With --min-response-tokens as many as the most, no response ends: each loses the penalty."""
    flags = f"{flags_of(folder)} --reward toy_rewards:lengths --min-response-tokens 6 --total-timesteps 16 --norm_adv=False"
    _, whole = train(f"{flags} --adaptive_kl=True", tmp_path)
    _, less = train(f"{flags} --missing-eos-penalty 3 --adaptive-kl=False", tmp_path)
    assert values(whole, "rlhf/reward")[0] > 6 and values(whole, "rlhf/ended_fraction") == [0]
    assert values(less, "rlhf/reward")[0] == pytest.approx(values(whole, "rlhf/reward")[0] - 3, abs=1e-5)


def test_fixed_validation_prompts():
    class Tokenizer:
        pad_token_id = eos_token_id = 0

        def __call__(self, text, **_):
            return {"input_ids": [int(text)] * 9}

    args = rlhf.Args()
    texts = [str(i) for i in range(1, 41)]
    fixed = [rlhf.draw_prompts(Tokenizer(), texts, 8, args, 20, k, True) for k in (0, 7)]
    fresh = [rlhf.draw_prompts(Tokenizer(), texts, 8, args, 20, k) for k in (0, 7)]
    assert fixed[0] == fixed[1] and fresh[0] != fresh[1] and [ids[-1] for ids in fixed[0]] == list(range(1, 9))
    assert {len(ids) for k in range(9) for ids in rlhf.draw_prompts(Tokenizer(), texts, 8, args, 20, k)} == {4, 5, 6, 7, 8}


def test_an_interrupted_run_goes_on_where_it_was(folder, tmp_path, monkeypatch):
    """The reward interrupts the second round, once."""
    import toy_rewards

    flags = f"{flags_of(folder)} --reward toy_rewards:lengths --save-model"
    monkeypatch.setattr(toy_rewards, "interrupt_in", -1)
    _, whole = train(flags, tmp_path)
    monkeypatch.setattr(toy_rewards, "interrupt_in", 2)
    message, _, cut = run(flags, tmp_path)
    assert message == f"round 1: interrupted; nothing is lost: --resume runs/{cut.name}/checkpoint.pt"
    assert run(f"--resume {cut}/checkpoint.pt", tmp_path)[0] is None
    ends = [torch.load(path / "ppo_iif_rlhf.cleanrl_model")["agent"] for path in (whole, cut)]
    assert all(torch.equal(p, ends[1][name]) for name, p in ends[0].items())


# ---- bad input


@pytest.mark.parametrize(
    "flags, culprit",
    [
        ("--model-name nobody/nothing", "--model-name nobody/nothing cannot be loaded"),
        ("--model-name ./nowhere", "--model-name ./nowhere cannot be loaded"),
        ("--model-name {}", "give a folder of config.json"),
        ("--model-name {}/bert", "its tokens see the ones after them"),
        ("--model-name {}/small", "its tokenizer has 24 tokens, its embedding only 9"),
        ("--model-name {}/mamba", "mamba has a state"),
        ("--reward-model-name {}/lm", "its weights lack score.weight"),
        ("--reward-model-name {}/lm2", "config.json, the weights (model.safetensors) and the tokenizer"),
        ("--reward-model-name {}/classifier --reward-index 2", "2 classes"),
        ("--dataset-name {}/none.txt", "--dataset-name"),
        ("--dataset-name nobody/nothing", "--dataset-name nobody/nothing"),
        ("--dataset-name {}/prompts.jsonl --dataset-text text", "--dataset-text"),
        ("--dataset-above toxicity", "--dataset-above"),
        ("--batch-size 81 --total-timesteps 81 --minibatch-size 1", "only 80 texts"),
        ("--max-prompt-tokens 30", "context"),
        ("--min-prompt-tokens 9", "--max-prompt-tokens 5"),
        ("--min-response-tokens 9", "--max-response-tokens 6"),
        ("--temperature 0", "--temperature 0"),
        ("--reward os:nothing", "--reward os:nothing: not"),
        ("--dataset-name {}/null.jsonl", "row 2 lacks a field of --dataset-text text"),
        ("--minibatch-size 17", "--minibatch-size 17"),
        ("--filter nothing:here", "--filter nothing:here"),
        ("--filter-percent 101", "--filter-percent"),
        (
            "--dataset-above prompt.toxicity:0.3",
            "row 1 lacks a field of --dataset-text text or --dataset-above prompt.toxicity:0.3",
        ),
        ("--eval-prompts 21", "only 20 texts"),
        ("--eval-model-name tiny", "--eval-prompts"),
        ("--kl-coef -1", "--kl-coef"),
        ("--advantage grpo --group-size 1", "--group-size 1 must be at least 2"),
        ("--advantage grpo --group-size 3", "--batch-size 16 must be a multiple of the 3 answers to a prompt"),
        ("--advantage grpo --validation-prompts 4", "--validation-prompts 4 must be a multiple of the 8 answers to a prompt"),
        ("--advantage grpo --target return", "--target return is, with --advantage grpo, --target seq times a number"),
        ("--learning-rate 0", "--learning-rate"),
        ("--resume {}/texts.txt", "--resume"),
    ],
)
def test_refused_before_work_starts(flags, culprit, folder, tmp_path):
    if "lm2" in flags:
        shutil.copytree(folder / "classifier", folder / "lm2", ignore=lambda *_: ["tokenizer.json"])
    if "mamba" in flags:
        shutil.copytree(folder / "lm", folder / "mamba")
        config = transformers.MambaConfig(vocab_size=len(WORDS), hidden_size=8, num_hidden_layers=1, state_size=2)
        transformers.MambaForCausalLM(config).save_pretrained(folder / "mamba")
    if "bert" in flags or "small" in flags:
        sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
        for name, size in (("bert", len(WORDS)), ("small", 9)):
            shutil.copytree(folder / "lm", folder / name, dirs_exist_ok=True)
            config = transformers.BertConfig(vocab_size=size, **sizes)
            transformers.BertLMHeadModel(config).save_pretrained(folder / name)
    if "null" in flags:
        (folder / "null.jsonl").write_text('{"text": "a film"}\n{"text": null}\n')
    message, out, done = run(f"{flags_of(folder)} {flags.format(folder)}", tmp_path)
    assert culprit in message and "\n" not in message and done is None


def test_a_hub_that_is_not_there_is_asked_once(folder, tmp_path, monkeypatch):
    """Not five times with growing waits; then all is looked for in the cache, also by `datasets`."""
    httpx2, asked = pytest.importorskip("httpx2"), []

    def handle(request):
        asked.append(str(request.url))
        raise httpx2.ConnectError("no network")

    def client():
        hooks = {"request": [hub_http.hf_request_event_hook]}
        return httpx2.Client(transport=httpx2.MockTransport(handle), event_hooks=hooks)

    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    hub.set_client_factory(client)
    try:
        message, out, _ = run(f"{flags_of(folder)} --model-name nobody/nothing", tmp_path)
        assert len(asked) == 1 and hub.constants.HF_HUB_OFFLINE and os.environ["HF_HUB_OFFLINE"] == "1"
    finally:
        hub.set_client_factory(hub_http.default_client_factory)
        os.environ.pop("HF_HUB_OFFLINE", None)
    assert message.startswith("--model-name nobody/nothing cannot be loaded: ") and "\n" not in message


def test_accelerates_launcher_for_the_cpu_is_refused(folder, tmp_path, monkeypatch):
    """It starts one process, whatever it is told: what it tells its child is made by its own code."""
    launch = pytest.importorskip("accelerate.commands.launch")
    command = "--cpu --num_processes 2 --num_machines 1 --mixed_precision no --dynamo_backend no"  # the last three by default
    given = launch.launch_command_parser().parse_args([*command.split(), str(SCRIPT)])
    _, environment = launch.prepare_simple_launcher_cmd_env(given)
    for name in environment.keys() - os.environ.keys():
        monkeypatch.setenv(name, environment[name])
    message, _, done = run(flags_of(folder), tmp_path)
    assert "use torchrun --nproc-per-node N" in message and "\n" not in message and done is None


def test_a_reward_that_is_not_finite_is_named_and_nothing_is_lost(folder, tmp_path):
    shutil.copytree(folder / "classifier", tmp_path / "classifier")
    model = transformers.GPT2ForSequenceClassification.from_pretrained(tmp_path / "classifier")
    with torch.no_grad():
        model.score.weight[0, 0] = torch.nan
    model.save_pretrained(tmp_path / "classifier")
    message, _, done = run(f"{flags_of(folder)} --reward-model-name {tmp_path}/classifier --save-model", tmp_path)
    assert "round 0: rewards of --reward-model-name" in message and "16 of 16 records" in message and "\n" not in message
    message, _, _ = run(f"--resume {done}/checkpoint.pt --reward-model-name {folder}/classifier", tmp_path)
    assert message is None and len(values(done, "rlhf/reward")) == 2


def test_texts_of_rows_and_whole_prompts(folder, tmp_path):
    """Fields of .jsonl rows above a number; evaluation on whole texts, longer than the context too."""
    assert len(rlhf.load_texts("--dataset-name", str(folder / "prompts.jsonl"), "prompt.text", "prompt.toxicity:0.3")) == 40
    (tmp_path / "long.txt").write_text("\n".join(["it was a good plot " * n for n in (1, 2, 20)]))
    out, done = train(
        f"{flags_of(folder)} --dataset-name {folder}/prompts.jsonl --dataset-text prompt.text --total-timesteps 16"
        f" --eval-dataset-name {tmp_path}/long.txt --eval-prompts 3",
        tmp_path,
    )
    assert "1 of 3 prompts are longer than the context: their last 26 tokens" in out
    assert len(values(done, "eval/reward")) == 2


def test_empty_responses_are_counted_and_rewarded(folder, tmp_path):
    """The model ends at once for one in 23 of them, more or less."""
    _, done = train(
        f"{flags_of(folder)} --reward-model-name {folder}/classifier --batch-size 64 --total-timesteps 64", tmp_path
    )
    assert 0 < values(done, "rlhf/empty_responses")[0] < 16 and np.isfinite(values(done, "rlhf/reward")).all()
