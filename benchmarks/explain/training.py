"""What one sees while a run trains: `python -m benchmarks.explain.training RUN`.

From the run's TensorBoard data alone (no snapshots needed): the histogram of the scores over the rounds, the return, and the three
numbers to watch: `influence/agreement`, `influence/noise_scale`, `influence/negative_fraction`. What to make of them:
docs/logging.md. Writes training.csv, training_scores.csv and training.png to RUN/explain/.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from benchmarks import files
from benchmarks.explain import snapshots
from benchmarks.explain.snapshots import save_figure, write_csv

COLUMNS = ("round", "global_step", "return", "agreement", "noise_scale", "negative_fraction", "filtered_round")
NUMBERS = COLUMNS[3:]


@dataclass
class Args:
    run: tyro.conf.Positional[str]
    """the folder of a run"""
    out: str | None = None
    """the folder to write to (default: RUN/explain/)"""
    plot: bool = False
    """only draw the picture, from the CSVs in the folder to write to"""


def read(run):
    """Rows of the two CSVs: of the rounds, and of the bins of their histograms that are not empty."""
    events = EventAccumulator(str(run), size_guidance={"scalars": 0, "histograms": 0}).Reload()
    tags = events.Tags()
    if "influence/scores" not in tags["histograms"]:
        sys.exit(f"{run}: there are no influence scores in it; a run with --filter none has none")
    scalars = {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in tags["scalars"]}
    ends = [step for step, _ in scalars["charts/round"]]
    numbers = {name: dict(scalars.get(f"influence/{name}", ())) for name in NUMBERS}
    rows, bins = [], []
    for k, (begin, end) in enumerate(zip([0, *ends], ends)):
        returns = [value for step, value in scalars.get("charts/episodic_return", ()) if begin < step <= end]
        found = [numbers[name].get(end, "") for name in NUMBERS]
        rows.append([k, end, float(np.mean(returns)) if returns else "", *found])
    rounds = {end: k for k, end in enumerate(ends)}
    for event in events.Histograms("influence/scores"):
        left = event.histogram_value.min
        for right, count in zip(event.histogram_value.bucket_limit, event.histogram_value.bucket):
            if count:
                bins.append([rounds[event.step], float(left), float(right), int(count)])
            left = right
    return rows, bins


def draw(path, title, rows, bins):
    """Four panels over the rounds: scores, return, the two shares, the noise scale."""
    plt = files.pyplot()
    rows = [{name: float(x) if x != "" else np.nan for name, x in row.items()} for row in rows]
    column = {name: np.array([row[name] for row in rows]) for name in COLUMNS}
    k, size = column["round"], column["global_step"][0]
    figure, axes = plt.subplots(
        4, 1, figsize=(7, 7.2), dpi=90, sharex=True, layout="constrained", height_ratios=[2, 1.2, 1, 1]
    )

    bins = np.array([[float(x) for x in row.values()] for row in bins])
    weights, middles = bins[:, 3], (bins[:, 1] + bins[:, 2]) / 2
    order = np.argsort(middles)
    low, high = np.interp([0.03, 0.97], weights[order].cumsum() / weights.sum(), middles[order])
    edges = np.linspace(min(low, -1e-12), max(high, 1e-12), 61)
    shares = np.zeros((60, len(k)))
    for r, left, right, count in bins:  # a bin of the log is spread over those of the picture
        inside = np.clip(np.minimum(edges[1:], right) - np.maximum(edges[:-1], left), 0, None)
        shares[:, int(r)] += count * inside / max(right - left, 1e-30)
    shares /= np.maximum(shares.max(0), 1e-30)
    axes[0].pcolormesh(np.arange(len(k) + 1) - 0.5, edges, shares**0.5, cmap="Blues")  # the root, so that tails show
    axes[0].axhline(0, color="k", lw=0.8)
    axes[0].set_ylabel("influence/scores")
    axes[0].text(0.99, 0.03, "below zero: harmful", transform=axes[0].transAxes, ha="right", fontsize=8)

    axes[1].plot(k, column["return"], "o-", color="#333333", ms=3, lw=1.2)
    axes[1].set_ylabel("return")
    axes[2].plot(k, column["agreement"], "o-", color="#0072B2", ms=3, lw=1.2, label="influence/agreement")
    axes[2].plot(k, column["negative_fraction"], "s-", color="#CC79A7", ms=3, lw=1.2, label="influence/negative_fraction")
    axes[2].axhline(0, color="k", lw=0.6)
    axes[2].set_ylim(-1.05, 1.05)
    axes[2].legend(frameon=False, fontsize=8, ncols=2, loc="lower right")
    axes[3].semilogy(k, column["noise_scale"], "o-", color="#E69F00", ms=3, lw=1.2, label="influence/noise_scale")
    axes[3].axhline(size, color="k", ls="--", lw=0.8, label=f"records of a round, {size:.0f}")
    unfinished = np.isnan(column["noise_scale"]) & ~np.isnan(column["agreement"])
    if unfinished.any():
        top = np.nanmax([*column["noise_scale"], size])
        axes[3].plot(k[unfinished], np.full(unfinished.sum(), 2 * top), "x", color="#E69F00", ms=5, label="infinite")
    axes[3].legend(frameon=False, fontsize=8, ncols=3, loc="lower right", bbox_to_anchor=(1, 0.95))
    axes[3].set_xlabel("round")
    axes[3].xaxis.get_major_locator().set_params(integer=True)
    for ax in axes:
        whole = k[column["filtered_round"] == 0]
        for r in whole:
            ax.axvspan(r - 0.5, r + 0.5, color="#dddddd", alpha=0.4, lw=0)
        ax.spines[["top", "right"]].set_visible(False)
        ax.tick_params(labelsize=8)
    axes[0].set_title(title + ("; grey: rounds left whole" if (column["filtered_round"] == 0).any() else ""), fontsize=10)
    save_figure(figure, path)
    plt.close(figure)


def main(args):
    out = Path(args.out) if args.plot and args.out else snapshots.folder(args.run, args.out)
    if not args.plot:
        rows, bins = read(args.run)
        write_csv(out / "training.csv", COLUMNS, rows)
        write_csv(out / "training_scores.csv", ("round", "left", "right", "records"), bins)
    if not (out / "training.csv").exists():
        sys.exit(f"--plot: there is no {out / 'training.csv'}")
    title = ", seed ".join(Path(args.run).name.split("__")[:3:2])
    draw(out / "training.png", title, files.read_csv(out / "training.csv"), files.read_csv(out / "training_scores.csv"))


if __name__ == "__main__":
    main(tyro.cli(Args))
