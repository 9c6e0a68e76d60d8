"""The page that shows what an agent learns from: in W&B, or drawn as a picture from a run's TensorBoard files.

    python sweeps/workspace.py make ENTITY                        # lay the page out in W&B, for all runs of the project
    python sweeps/workspace.py export runs/RUN FOLDER             # what a run logged of it, as two CSVs
    python sweeps/workspace.py draw FOLDER PAGE.png               # the page, drawn from them
    python sweeps/workspace.py rounds PICTURE.png FOLDER:4 ...    # histograms of single rounds, side by side

`make` needs the package wandb-workspaces and a W&B account, the others what benchmarks/ needs.
"""

import sys
from pathlib import Path

import tyro

X, SCORES = "global_step", "influence/scores"
# Title, logged names, logarithmic axis; two rows of three.
PAGE = [
    ("Return", ["eval/episodic_return", "charts/episodic_return"], False),
    ("Influence of the records", [SCORES], False),
    ("Agreement of the round's two halves", ["influence/agreement"], False),
    ("Share of the records", ["influence/negative_fraction", "influence/dropped_fraction"], False),
    ("Records that a round would need (noise scale)", ["influence/noise_scale"], True),
    ("Seconds of a round", ["time/rollout", "time/scoring", "time/update"], False),
]
COLUMNS = 3


def workspace(entity, project):
    """The page as a Workspace of wandb_workspaces, not saved yet."""
    try:
        import wandb_workspaces.reports.v2 as wr
        import wandb_workspaces.workspaces as ws
    except ImportError:
        sys.exit("the page in W&B needs one more package: pip install wandb-workspaces==0.4.13")
    panels = [
        (
            wr.MediaBrowser(title=title, media_keys=names)
            if SCORES in names
            else wr.LinePlot(title=title, x=X, y=names, log_y=log)
        )
        for title, names, log in PAGE
    ]
    layout = ws.SectionLayoutSettings(columns=COLUMNS, rows=len(PAGE) // COLUMNS)
    section = ws.Section(name="What the agent learns from", panels=panels, is_open=True, layout_settings=layout)
    settings = ws.WorkspaceSettings(x_axis=X)
    return ws.Workspace(entity=entity, project=project, name="PPO-IIF", sections=[section], settings=settings)


def make(entity: tyro.conf.Positional[str], project: str = "ppo-iif"):
    """Save the page in W&B as a view of the project, and print its address."""
    print(workspace(entity, project).save().url)


def export(run: tyro.conf.Positional[Path], folder: tyro.conf.Positional[Path]):
    """Write what a run logged of the page to `folder`: scalars.csv, and scores.csv with the bins of each histogram that hold
    records."""
    import pandas as pd
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run), size_guidance={"scalars": 0, "histograms": 0}).Reload()
    logged = events.Tags()["scalars"]
    names = [name for _, names, _ in PAGE for name in names if name in logged]
    if not names:
        sys.exit(f"{run} holds no TensorBoard files of a run of these scripts")
    scalars = [(name, event.step, event.value) for name in names for event in events.Scalars(name)]
    bins = []
    for event in events.Histograms(SCORES) if SCORES in events.Tags()["histograms"] else []:
        histogram = event.histogram_value
        right = histogram.bucket_limit
        bins += [(event.step, *row) for row in zip([histogram.min, *right], right, histogram.bucket) if row[-1]]
    folder.mkdir(parents=True, exist_ok=True)
    scalars = pd.DataFrame(scalars, columns=["name", "step", "value"])
    scalars.to_csv(folder / "scalars.csv", index=False, float_format="%.5g")
    bins = pd.DataFrame(bins, columns=["step", "left", "right", "records"]).astype({"records": int})
    bins.to_csv(folder / "scores.csv", index=False, float_format="%.5g")


def draw(folder: tyro.conf.Positional[Path], picture: tyro.conf.Positional[Path]):
    """Draw the page from what `export` wrote."""
    import matplotlib.pyplot as plt
    import pandas as pd

    scalars, bins = pd.read_csv(folder / "scalars.csv"), pd.read_csv(folder / "scores.csv")
    figure, axes = plt.subplots(len(PAGE) // COLUMNS, COLUMNS, figsize=(13, 6), sharex=True, layout="constrained")
    for ax, (title, names, log) in zip(axes.flat, PAGE):
        ax.set_title(title, fontsize=10)
        if SCORES in names:
            _heatmap(ax, bins)
            continue
        for name in names:
            line = scalars[scalars.name == name]
            # One episode says little: points behind the line of the evaluation.
            style = {"marker": ".", "ls": "none", "alpha": 0.3, "zorder": 1} if name == "charts/episodic_return" else {}
            if len(line):
                ax.plot(line.step, line.value, label=name, **style)
        if log:
            ax.set_yscale("log")
        if ax.lines:
            ax.legend(fontsize=7, frameon=False)
        ax.grid(alpha=0.3)
    for ax in axes[-1]:
        ax.set_xlabel(X)
    _save(figure, picture)


def rounds(picture: tyro.conf.Positional[Path], of: tyro.conf.Positional[tuple[str, ...]]):
    """Draw the histograms of single rounds, FOLDER:ROUND each, with what was logged beside them."""
    import matplotlib.pyplot as plt
    import pandas as pd

    figure, axes = plt.subplots(1, len(of), figsize=(5 * len(of), 3.2), layout="constrained", squeeze=False)
    for ax, name in zip(axes.flat, of):
        folder, _, k = name.rpartition(":")
        scalars, bins = pd.read_csv(Path(folder) / "scalars.csv"), pd.read_csv(Path(folder) / "scores.csv")
        step = bins.step.unique()[int(k)]
        row = scalars[scalars.step == step].drop_duplicates("name", keep="last").set_index("name").value
        bins = bins[bins.step == step]
        colors = ["tab:red" if right <= 0 else "tab:blue" for right in bins.right]
        ax.bar(bins.left, bins.records, bins.right - bins.left, align="edge", color=colors)
        ax.set_yscale("log")
        ax.set_xlabel("influence/scores")
        ax.set_ylabel("records")
        ax.set_title(
            f"{Path(folder).name}, round {k}: agreement {row['influence/agreement']:.2f},"
            f" {row['influence/negative_fraction']:.0%} negative",
            fontsize=10,
        )
    _save(figure, picture)


def _heatmap(ax, bins):
    """Histograms over the steps; colour is the share of the round's records. What lies beyond the axis, one percent, is left
    out."""
    import numpy as np

    if bins.empty:
        return
    size = bins[["left", "right"]].abs().max(axis=1).sort_values()
    limit = size.iloc[np.searchsorted(bins.records[size.index].cumsum(), 0.99 * bins.records.sum())]
    edges = np.linspace(-limit, limit, 41)  # zero is an edge, as in the histograms
    steps = bins.step.unique()
    image = np.empty((len(edges) - 1, len(steps)))
    for column, (_, one) in enumerate(bins.groupby("step")):
        below = np.append(0, one.records.cumsum()) / one.records.sum()
        image[:, column] = np.diff(np.interp(edges, np.append(one.left.iloc[0], one.right), below))
    mesh = ax.pcolormesh(
        steps, (edges[1:] + edges[:-1]) / 2, np.where(image > 0, image, np.nan), norm="log", shading="nearest"
    )
    ax.figure.colorbar(mesh, ax=ax, label="share of the records")
    ax.axhline(0, color="tab:red", lw=0.7)


def _save(figure, picture):
    from PIL import Image

    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=90)
    Image.open(picture).convert("RGB").quantize(128).save(picture, optimize=True)  # a third of the size
    print(picture)


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({f.__name__: f for f in (make, export, draw, rounds)})
