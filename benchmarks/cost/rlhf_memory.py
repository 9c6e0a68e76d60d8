"""The arithmetic by which the README estimates the memory of ppo_iif_rlhf.py, checked on its small model.

    python -m benchmarks.cost.rlhf_memory        (Linux with glibc, on the CPU; python -m benchmarks.reproduce.rlhf_tiny builds the model)

It writes results/cost/rlhf_memory.csv, the table in docs/language-models.md.

Predicted: sampling keeps keys and values; the gradient of the target and an update keep what autograd saves for their records
(weights are not counted), the gradient of the logits, a gradient for each trainable weight and, for the update, Adam's two
moments; the scores keep the hidden states and three copies of the logits (as they come, as a matrix, as log-probs), each with
its tangent. Measured: what a part adds at its peak, in a fresh process for each (VmHWM after
it - VmRSS before it), after a first call with two records.
"""

import gc
import subprocess
import sys
from pathlib import Path

import torch

import ppo_iif_rlhf as rlhf
from benchmarks import files
from benchmarks.cost.scoring import allocator

RESULTS = files.RESULTS / "cost" / "rlhf_memory.csv"
PARTS = ("sampling", "target", "scores", "update")


def saved_bytes(agent, batch, n):
    """Bytes that autograd saves in a forward pass of n records, each storage once, without the weights."""
    weights, found = {p.untyped_storage().data_ptr() for p in agent.parameters()}, {}

    def keep(x):
        found[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        logprobs, _ = agent(*(batch[name][:n] for name in ("query", "query_mask", "response", "mask")))
    del logprobs
    return sum(size for storage, size in found.items() if storage not in weights)


def measure(part, lora_r, chunk):
    """Predicted and measured MB of one part, for `chunk` records at a time (the update: a minibatch of them)."""

    def status(field):
        return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(field)) * 1024

    allocator(keep=False)
    torch.set_num_threads(1)
    args = rlhf.Args(lora_r=lora_r, score_chunk=chunk, minibatch_size=chunk, batch_size=2 * chunk, update_epochs=1)
    agent, reference, tokenizer = rlhf.make_agent(args, "cpu")
    params = [p for p in agent.parameters() if p.requires_grad]
    prompts = rlhf.draw_prompts(tokenizer, rlhf.load_texts("--dataset-name", "reviews"), args.batch_size, args, 10, 0)
    batch = rlhf.rollout(
        agent, reference, tokenizer, rlhf.make_reward(args, "cpu"), prompts, args, torch.Generator().manual_seed(0)
    )
    batch = rlhf.whiten(rlhf.gae(batch, args.kl_coef, args.gamma, args.gae_lambda))
    optimizer = torch.optim.Adam(params, 0.0, fused=True)
    if part in ("target", "scores"):  # one without the other
        direction = {name: torch.zeros_like(p) for name, p in agent.named_parameters() if p.requires_grad}
        if part == "target":
            rlhf.influence_scores = lambda *_, **__: torch.zeros(args.batch_size)
        else:
            rlhf.target_gradient = lambda *_, **__: direction

    def run(n):
        some = {name: x[:n] for name, x in batch.items()}
        args.batch_size = n
        if part == "sampling":
            rlhf.generate(agent, some["query"], some["query_mask"], 0, args, torch.Generator().manual_seed(0))
        elif part == "update":
            rlhf.update(agent, optimizer, some, torch.arange(n), args, torch.Generator())
        else:
            rlhf.score(agent, some, args)

    config, (n, prompt), length = agent.lm.config, batch["query"].shape, batch["response"].shape[1]
    width, layers, tokens = config.hidden_size, config.num_hidden_layers, prompt + length
    weights, logits = sum(p.numel() for p in params) * 4, length * config.vocab_size * 4
    predicted = {
        "sampling": n * tokens * layers * 2 * width * 4,
        "target": saved_bytes(agent, batch, chunk) + chunk * logits + weights,
        "scores": chunk * ((layers + 1) * 2 * tokens * width * 4 + 6 * logits),
        "update": saved_bytes(agent, batch, chunk) + chunk * logits + 3 * weights,
    }[part]
    if part != "update":
        run(2)  # loads what a first call loads
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # takes the high-water mark down to what is held now
    before = status("VmRSS")
    run(n)
    return predicted / 1e6, (status("VmHWM") - before) / 1e6


def table():
    """Markdown, as in docs/language-models.md."""
    rows = [list(row.values()) for row in files.read_csv(RESULTS)]
    return files.table(["weights trained", "part", "predicted, MB", "measured, MB"], rows, left=2)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(*measure(sys.argv[1], int(sys.argv[2]), 64))
        sys.exit()
    rows = []
    for lora_r in (0, 16):
        for part in PARTS:
            command = [sys.executable, "-m", "benchmarks.cost.rlhf_memory", part, str(lora_r)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            predicted, measured = (f"{float(x):.0f}" for x in done.stdout.split()[-2:])
            what = "sampling 128 answers" if part == "sampling" else "gradient of the target" if part == "target" else part
            rows.append(["LoRA" if lora_r else "all", what, predicted, measured])
    files.write_csv(RESULTS, ["weights", "part", "predicted_mb", "measured_mb"], rows)
    print(table())
