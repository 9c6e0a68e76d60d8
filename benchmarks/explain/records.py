"""Which records of a round helped or hurt, and are their advantages wrong: `python -m benchmarks.explain RUN --round 5`.

RUN is the folder of a run with `--snapshot-rounds`. Writes to RUN/explain/: the records of the lowest and highest scores (CSV;
drawn on the grid for FrozenLake and MiniGrid, as frames for the others), and the rank of all records by influence against the
error of their advantage, |A_true - A|, and its agreement, A_true * A (CSV, PNG): the paper's section 4.1, figures 3 and 8.

A_true is the true advantage, estimated by Monte Carlo: from the returns in the buffer, where states recur in it, or with
`--advantages replay` from episodes of the round's policy in a simulator that is reset to the record's state.
"""

import copy
import sys
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
import tyro

from benchmarks import files
from benchmarks.explain import snapshots
from benchmarks.explain.snapshots import save_figure, spearman, write_csv
from benchmarks.variants.filters import identical, mc_advantages


@dataclass
class Args:
    run: tyro.conf.Positional[str]
    """the folder of a run"""
    round: int
    """which of its saved rounds"""
    advantages: Literal["buffer", "replay"] = "buffer"
    """A_true from the round's own returns, or from the simulator reset to the state of each record"""
    trajectories: int = 100
    """with replay: episodes from each state, and as many that begin with the record's action"""
    sample: int = 0
    """with replay: estimate A_true for so many records only, evenly over the ranks (0: all)"""
    records: int = 100
    """how many of the lowest and of the highest records to list and to draw"""
    frames: bool = True
    """render the records; the environment is played up to this round for it, which for slow ones takes long"""
    any_version: bool = False
    """open the snapshot also where the environment's packages have other versions"""
    out: str | None = None
    """the folder to write to (default: RUN/explain/)"""


# ---- true advantages


def simulator_state(env):
    """The name of the attribute that is a simulator's whole state; "" if a deep copy has it; None if neither can reset it."""
    kind = type(env.unwrapped)
    if kind.__module__ == "gymnasium.envs.toy_text.frozen_lake":
        return "s"
    if kind.__module__.startswith("gymnasium.envs.classic_control."):
        return "state"
    # A copy of many others is silently a new environment, or shares the simulator with the first.
    return "" if any(base.__module__ == "minigrid.minigrid_env" for base in kind.__mro__) else None


def simulated_returns(envs, act, obs, gamma, first_action=None):
    """Discounted returns [len(envs)] of an episode in each of the environments, which are all in one state, seen as `obs`."""
    returns, seen, discount = np.zeros(len(envs)), [obs] * len(envs), 1.0
    playing = list(range(len(envs)))
    while playing:
        actions = act(np.stack([seen[i] for i in playing]))
        if first_action is not None:
            actions, first_action = [first_action] * len(playing), None
        for i, action in list(zip(playing, actions)):
            seen[i], reward, terminated, truncated, _ = envs[i].step(action)
            seen[i] = seen[i].astype(obs.dtype)
            returns[i] += discount * reward
            if terminated or truncated:
                playing.remove(i)
        discount *= gamma
    return returns


def replayed_advantages(snapshot, trajectories, records, seed=0):
    """Monte-Carlo advantages Q - V of `records`, {record: float}, each from `trajectories` episodes of theta(k) that start in
    the record's state (V), and as many that start with its action (Q). An episode lasts as long as the environment lets it.
    """
    args, script = snapshot.args, snapshot.script
    attribute = simulator_state(snapshot.envs.envs[0])
    if attribute is None:
        sys.exit(
            f"--advantages replay: {args.env_id} cannot be reset to a state; FrozenLake, classic control and MiniGrid can"
        )
    if getattr(args, "norm_obs", False) or getattr(args, "norm_reward", False):
        sys.exit("--advantages replay: the simulator has neither this run's normalised observations nor rewards")
    rng = np.random.default_rng(seed)
    act = snapshots.policy(snapshot.agent(), rng)
    pool = script.make_eval_envs(replace(args, eval_episodes=trajectories))  # 32 at most
    known = {}  # mean returns of (state, action or None)

    def mean_return(env, obs, action=None):
        returns = []
        while len(returns) < trajectories:
            envs = pool[: trajectories - len(returns)]
            seeds = rng.integers(2**31, size=len(envs)).tolist()
            if attribute:
                for other, s in zip(envs, seeds):
                    other.reset(seed=s)
                    setattr(other.unwrapped, attribute, copy.copy(getattr(env.unwrapped, attribute)))
            else:
                envs = [copy.deepcopy(env) for _ in envs]
                for other, s in zip(envs, seeds):
                    other.unwrapped.np_random = np.random.default_rng(s)
            returns.extend(simulated_returns(envs, act, obs, args.gamma, action))
        return np.mean(returns)

    advantages, records = {}, set(records)
    obs, actions = snapshot.batch["obs"].numpy(), snapshot.batch["actions"].numpy()
    for t, envs in files.progress(enumerate(snapshot.replay()), "step", args.num_steps):
        for i, env in enumerate(envs.envs):
            r = snapshot.record(t, i)
            if r not in records:
                continue
            # A state that recurs is simulated once; what a deep copy holds (the time that is left, too) has no name.
            state = np.asarray(getattr(env.unwrapped, attribute)).tobytes() if attribute else r
            for action in (None, actions[r]):
                key = (state, action if action is None else action.tobytes())
                if key not in known:
                    known[key] = mean_return(env, obs[r], action)
            advantages[r] = known[state, actions[r].tobytes()] - known[state, None]
            if len(advantages) % 100 == 0:
                files.say(f"A_true of {len(advantages)} records, {len(known)} simulations")
    return advantages


# ---- pictures

TILE = 32  # pixels of a cell
SHEET, SHEET_COLUMNS = 18, 6  # frames of each side, and how many of them in a row


def draw_ranks(path, title, scores, advantages, a_true, rho):
    """Rank by decreasing influence against |A_true - A| and A_true * A (figure 3 c, d)."""
    plt = files.pyplot()
    order = np.argsort(-scores, kind="stable")
    rank = np.arange(1, len(order) + 1)
    a, b = advantages[order], a_true[order]
    there = ~np.isnan(b)
    fig, axes = plt.subplots(1, 2, figsize=(10, 3.6), dpi=110)
    for ax, y, name, label in zip(axes, (np.abs(b - a), b * a), rho, ("|A_true - A|", "A_true * A")):
        for same, colour, text in ((True, "tab:green", "same sign"), (False, "tab:red", "other sign")):
            shown = there & ((a * b >= 0) == same)
            ax.scatter(rank[shown], y[shown], s=5, color=colour, label=f"{text} of A_true and A", linewidths=0)
        ax.axvspan(0, 0.2 * len(order), color="tab:green", alpha=0.08)
        ax.axvspan(0.8 * len(order), len(order), color="tab:red", alpha=0.08)
        ax.set(xlabel="rank by decreasing influence", ylabel=label, title=f"Spearman with the rank {rho[name]:+.2f}")
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False, fontsize=8)
    fig.suptitle(title)
    fig.tight_layout()
    save_figure(fig, path)
    plt.close(fig)


DIRECTIONS = np.array([(1, 0), (0, 1), (-1, 0), (0, -1)])  # MiniGrid's: right, down, left, up; y grows downwards
FROZEN_LAKE = (2, 1, 0, 3)  # its actions left, down, right, up as indices of DIRECTIONS


def draw_grid(path, title, background, places, actions, advantages, sides):
    """Records on a grid, those of each side in a picture of its own: a mark for each (place, action, sign of the advantage).

    background: a picture of the grid, TILE pixels a cell. places: [N] of x, y, and the direction that the agent looks in, or
    None where its actions are directions themselves (FrozenLake).
    """
    from matplotlib.patches import FancyArrowPatch

    plt = files.pyplot()
    fig, axes = plt.subplots(1, len(sides), figsize=(5 * len(sides), 5.2), dpi=110)
    for ax, (side, records) in zip(axes, sides.items()):
        ax.imshow(
            background, extent=(-0.5, background.shape[1] / TILE - 0.5, background.shape[0] / TILE - 0.5, -0.5), alpha=0.6
        )
        marks = {}
        for r in records:
            key = (places[r], int(actions[r]), bool(advantages[r] >= 0))
            marks[key] = marks.get(key, 0) + 1
        most = max(marks.values())
        for ((x, y, looks), action, positive), count in sorted(marks.items(), key=lambda item: -item[1]):
            size = np.sqrt(count / most)
            before = DIRECTIONS[FROZEN_LAKE[action] if looks is None else looks]
            shift = 0.1 * before[::-1] * (1 if positive else -1)  # so that the two signs do not hide each other
            style = {"color": "tab:green" if positive else "tab:red", "alpha": 0.85, "zorder": 3}
            if looks is not None and action > 2:  # of MiniGrid: pick up, drop, toggle, done
                ax.scatter(*((x, y) + 0.3 * before + shift), marker="s", s=10 + 60 * size, linewidths=0, **style)
                continue
            begin, end, bend = (x, y) + 0.05 * before, (x, y) + 0.45 * before, 0.0
            if looks is not None and action < 2:  # turns left or right
                begin, end = (x, y) + 0.2 * before, (x, y) + 0.4 * DIRECTIONS[(looks + (1 if action else -1)) % 4]
                bend = -0.4 if action else 0.4
            arrow = FancyArrowPatch(
                *(begin + shift, end + shift),
                connectionstyle=f"arc3,rad={bend}",
                arrowstyle=f"simple,tail_width={1 + 5 * size},head_width={5 + 10 * size},head_length={4 + 6 * size}",
                linewidth=0,
                **style,
            )
            ax.add_patch(arrow)
        ax.set(title=f"{side} {len(records)} records", xticks=[], yticks=[])
    others = "" if looks is None else "; curved: turns, square: neither turn nor forward"
    fig.suptitle(f"{title}\ngreen: A > 0, red: A < 0; larger: more records{others}", fontsize=11)
    fig.tight_layout()
    save_figure(fig, path)
    plt.close(fig)


def frozen_lake_background(desc):
    """The ice [pixels, pixels, 3]: start grey, frozen white, hole blue, goal gold."""
    colours = {b"S": (215, 215, 215), b"F": (250, 250, 250), b"H": (150, 180, 220), b"G": (255, 215, 80)}
    return np.array([[colours[letter] for letter in row] for row in desc], dtype=np.uint8).repeat(TILE, 0).repeat(TILE, 1)


def draw_sheet(path, title, frames, sides, caption):
    """A contact sheet of frames {record: picture}, one block of them for each side."""
    plt = files.pyplot()
    shown = {side: [r for r in records if r in frames] for side, records in sides.items()}
    rows = max(-(-len(records) // SHEET_COLUMNS) for records in shown.values())
    fig = plt.figure(figsize=(1.7 * SHEET_COLUMNS * len(shown), 2.1 * rows + 0.9), dpi=110, layout="constrained")
    fig.suptitle(title)
    for block, (side, records) in zip(fig.subfigures(1, len(shown)), shown.items()):
        block.suptitle(f"{side} records", fontsize=11)
        axes = block.subplots(rows, SHEET_COLUMNS, squeeze=False).flat
        for ax, r in zip(axes, records):
            ax.imshow(frames[r], cmap="gray")
            ax.set_title(caption(r), fontsize=6)
        for ax in block.axes:
            ax.axis("off")
    save_figure(fig, path)
    plt.close(fig)


# ---- what the records look like


def action_names(env):
    """Names of the discrete actions, or None."""
    if type(env.unwrapped).__module__ == "gymnasium.envs.toy_text.frozen_lake":
        return ["left", "down", "right", "up"]
    if hasattr(env.unwrapped, "get_action_meanings"):  # Atari
        return [name.lower() for name in env.unwrapped.get_action_meanings()]
    if simulator_state(env) == "":
        return [action.name for action in env.unwrapped.actions]
    return None


def look(snapshot, wanted, render):
    """Where the records took place, and pictures of those `wanted`, as far as there are any.

    Returns the background [pixels, pixels, 3] and the places [N] for draw_grid, or None and None; and frames {record: picture}.
    """
    env, obs = snapshot.envs.envs[0], snapshot.batch["obs"].numpy()
    if obs.ndim == 4 and obs.shape[1:] == (4, 84, 84):  # a stack of Atari frames: older ones fainter, so that motion shows
        fading = np.array([0.4, 0.55, 0.75, 1.0])[:, None, None]
        return None, None, {r: (obs[r] * fading).max(0) for r in wanted}
    kind = simulator_state(env)
    if kind == "s":  # one-hot observations of the cells, row by row
        columns = env.unwrapped.ncol
        places = [(int(s % columns), int(s // columns), None) for s in obs.argmax(1)]
        return frozen_lake_background(env.unwrapped.desc), places, {}
    if not render or (kind != "" and "rgb_array" not in env.metadata.get("render_modes", ())):
        return None, None, {}
    places, frames, grids, wanted = [], {}, set(), set(wanted)
    print(f"playing {len(snapshot.data['played'])} steps up to the end of this round", flush=True)
    for t, envs in enumerate(snapshot.replay(render=kind != "")):
        for i, env in enumerate(e.unwrapped for e in envs.envs):
            r = snapshot.record(t, i)
            if kind == "":
                places.append((*map(int, env.agent_pos), int(env.agent_dir)))
                grids.add(env.grid.encode().tobytes())
            if r in wanted:
                frames[r] = env.get_frame(highlight=True, tile_size=16) if kind == "" else env.render()
                if type(env).__name__ == "BipedalWalker":  # it is small, and always there
                    frames[r] = frames[r][frames[r].shape[0] // 3 :, : frames[r].shape[1] // 2]
    if len(grids) == 1:  # the same for all records, so they can be drawn on it
        return env.grid.render(TILE, agent_pos=(-1, -1)), places, frames
    return None, None, frames


def table(folder):
    """Markdown: the rank correlations of every ranks CSV in the folders FOLDER/RUN[_replay]/."""
    lines = []
    for path in sorted(folder.glob("*/round_*_ranks.csv")):
        rows = [[float(row[c]) for c in ("rank", "advantage", "a_true")] for row in files.read_csv(path)]
        rank, advantage, a_true = np.array(rows).T
        run, source = path.parent.name.replace("_", " "), "buffer"
        if run.endswith(" replay"):
            run, source = run.removesuffix(" replay"), "simulator"
        rho = spearman(rank, np.abs(a_true - advantage)), spearman(rank, a_true * advantage)
        lines.append([run, source, int(path.name.split("_")[1]), len(rank), *(f"{x:+.2f}" for x in rho)])
    return files.table(
        ["run", "A_true from", "round", "records", "rank and abs(A_true - A)", "rank and A_true * A"], lines, left=2
    )


def main(args):
    snapshot = snapshots.load(args.run, args.round, args.any_version)
    out = snapshots.folder(args.run, args.out)
    name, batch = f"round_{args.round:06d}", {key: x.cpu() for key, x in snapshot.batch.items()}
    title = f"{snapshot.args.env_id}, seed {snapshot.args.seed}, round {args.round}"
    scores, advantages = batch["scores"].double().numpy(), batch["advantages"].double().numpy()
    kept = torch.zeros(len(scores), dtype=torch.bool)
    kept[snapshot.selection.nonzero().flatten() if snapshot.selection.is_floating_point() else snapshot.selection] = True

    descending = np.argsort(-scores, kind="stable")
    if args.advantages == "replay":
        sample = descending[np.linspace(0, len(scores) - 1, args.sample or len(scores)).round().astype(int)]
        a_true = np.full(len(scores), np.nan)
        for r, value in replayed_advantages(snapshot, args.trajectories, sample.tolist()).items():
            a_true[r] = value
    else:
        a_true = mc_advantages(batch, snapshot.args.gamma, snapshot.args.num_envs).numpy()
        state = identical(batch["obs"])
        alone = (state.bincount() == 1)[state].numpy()
        a_true[alone] = np.nan  # there Q = V tells nothing
        if alone.any():
            print(
                f"{alone.sum()} records are alone in their state, where the buffer has no A_true; --advantages replay may have"
            )

    n = min(args.records, len(scores) // 2)
    sides = {"bottom": descending[::-1][:n].tolist(), "top": descending[:n].tolist()}
    background, places, frames = look(snapshot, sides["bottom"][:SHEET] + sides["top"][:SHEET], args.frames)
    names = action_names(snapshot.envs.envs[0])

    def action(r):
        a = batch["actions"][r]
        return " ".join(f"{x:.2f}" for x in a) if a.dim() else names[a] if names else str(int(a))

    columns = ("rewards", "dones", "logprobs", "values", "returns")
    rows = []
    for side, records in sides.items():
        for r in records:
            obs = batch["obs"][r]
            row = [side, r, r // snapshot.args.num_envs, r % snapshot.args.num_envs, scores[r], action(r), advantages[r]]
            row += ["" if np.isnan(a_true[r]) else a_true[r], int(kept[r]), *(float(batch[column][r]) for column in columns)]
            row += [" ".join(map(str, places[r][:2])) if places else ""]
            rows.append(row + [" ".join(f"{x:.4g}" for x in obs.tolist()) if obs.dim() == 1 else ""])
    header = ["side", "record", "step", "env", "score", "action", "advantage", "a_true", "kept", *columns, "place", "obs"]
    write_csv(out / f"{name}_records.csv", header, rows)
    if places:
        draw_grid(out / f"{name}_grid.png", title, background, places, batch["actions"], advantages, sides)
    if frames:
        caption = "#{} {}\nA {:+.2g}, score {:+.1e}"
        draw_sheet(
            out / f"{name}_frames.png", title, frames, sides, lambda r: caption.format(r, action(r), advantages[r], scores[r])
        )

    there = np.flatnonzero(~np.isnan(a_true[descending]))
    if len(there):
        r = descending[there]
        rho = {"|A_true - A|": spearman(there, np.abs(a_true[r] - advantages[r]))}
        rho["A_true * A"] = spearman(there, a_true[r] * advantages[r])
        for label, value in rho.items():
            print(f"Spearman correlation of the rank by decreasing influence and {label}: {value:+.3f} ({len(r)} records)")
        rows = zip((there + 1).tolist(), r.tolist(), scores[r], advantages[r], a_true[r])
        write_csv(out / f"{name}_ranks.csv", ["rank", "record", "score", "advantage", "a_true"], rows)
        draw_ranks(out / f"{name}_ranks.png", title, scores, advantages, a_true, rho)


def parse_args():
    args = tyro.cli(Args)
    for flag in ("trajectories", "records"):
        if getattr(args, flag) < 1:
            sys.exit(f"--{flag} must be at least 1, got {getattr(args, flag)}")
    if args.sample < 0 or args.sample == 1:
        sys.exit(f"--sample must be 0 (all) or at least 2, got {args.sample}")
    return args
