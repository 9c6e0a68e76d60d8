"""highway-v0 at hundreds of times its speed: envpool's, as `--env-id benchmarks.variants.envpool_highway:EnvpoolHighway-v0`.

The two differ in one rule: where MOBIL would let another car change to either side, highway_env 1.12 sends it right (its loop
goes on, and the last lane wins), envpool 1.2.5 left (it stops at the first). So this plays envpool's highway in the mirror: its
lanes, the two lane actions and the side that the reward favours are swapped, and what it shows is highway-v0 again.

`python -m benchmarks.variants.envpool_highway` compares the two, in the paper's setting of 10 vehicles, and writes
results/highway/twin_steps.csv: episodes from the same start with the same actions, step for step;
results/highway/twin.csv: statistics of episodes of their own, and of starts, with a test of each.
"""

from importlib.util import find_spec

import gymnasium as gym
import numpy as np

from benchmarks import files

LANES, LANE_WIDTH = 4, 4.0
MIDDLE = (LANES - 1) * LANE_WIDTH  # y in the mirror: MIDDLE - y
COLLISION, RIGHT_LANE, HIGH_SPEED = -1.0, 0.1, 0.4  # highway-v0's rewards
MIRRORED = np.array([2, 1, 0, 3, 4])  # LANE_LEFT, IDLE, LANE_RIGHT, FASTER, SLOWER


class EnvpoolHighway(gym.Env):
    """highway-v0 with its defaults but vehicles_count: Kinematics observations [5, 5], five meta-actions, 40 steps."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 5}

    def __init__(self, vehicles_count=50, render_mode=None):
        if not find_spec("envpool"):
            raise gym.error.DependencyNotInstalled("envpool is not installed: pip install -r requirements-benchmarks.txt")
        self.render_mode = render_mode
        self.config = {"vehicles_count": vehicles_count, "right_lane_reward": -RIGHT_LANE, "normalize_reward": False}
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (5, 5), np.float32)
        self.action_space = gym.spaces.Discrete(len(MIRRORED))
        self.pool = None

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if self.pool is None or seed is not None:  # envpool takes seeds, below 2**31, only where it makes environments
            import envpool  # not above: the report of benchmarks/ does without it

            seed = int(self.np_random.integers(2**31))
            self.pool = envpool.make_gymnasium(
                "Highway-v0", num_envs=1, num_threads=1, seed=seed, render_mode=self.render_mode, **self.config
            )
        # This instead of the step after an episode's end, which would show the same observation as a transition to it.
        obs, info = self.pool.reset()
        return self._mirrored(obs[0]), self._info(info)

    def step(self, action):
        obs, reward, terminated, truncated, info = self.pool.step(MIRRORED[[action]])
        obs = self._mirrored(obs[0])
        y = obs[0, 2] * LANES * LANE_WIDTH
        on_road = -LANE_WIDTH / 2 <= y <= MIDDLE + LANE_WIDTH / 2
        # envpool's sum takes RIGHT_LANE off where highway-v0 adds it; then as highway-v0 maps the least to 0, the most to 1
        reward = (float(reward[0]) + RIGHT_LANE - COLLISION) / (HIGH_SPEED + RIGHT_LANE - COLLISION) if on_road else 0.0
        return obs, reward, bool(terminated[0]), bool(truncated[0]), self._info(info)

    def render(self):
        return self.pool.render()[0, ::-1].copy()

    def close(self):
        if self.pool is not None:
            self.pool.close()

    @staticmethod
    def _info(info):
        return {"speed": float(info["speed"][0]), "crashed": bool(info["crashed"][0])}

    @staticmethod
    def _mirrored(obs):
        """Row 0 holds y itself, the others y relative to it; each in units of the road's 16 m. Columns: presence, x, y, vx, vy."""
        obs = obs.copy()
        obs[:, [2, 4]] *= -1
        obs[0, 2] += MIDDLE / (LANES * LANE_WIDTH)
        return obs + 0.0  # no -0.0


gym.register("EnvpoolHighway-v0", entry_point=EnvpoolHighway)


# ---- does it agree with highway_env's?

POLICIES = {
    "random": lambda rng: int(rng.integers(5)),
    "IDLE": lambda rng: 1,
    "FASTER": lambda rng: 3,
    "SLOWER": lambda rng: 4,
    "random lanes": lambda rng: int(rng.choice([0, 2])),
}
RESULTS = files.RESULTS / "highway"
FEATURES = [f"{name} {row}" for row in range(5) for name in ("presence", "x", "y", "vx", "vy")]


def highway_env():
    """highway-v0 in the setting of suites.HIGHWAY."""
    return gym.make(
        "highway_env:highway-v0",
        config={"vehicles_count": 10, "observation": {"type": "Kinematics"}},
        disable_env_checker=True,
    ).unwrapped


def copy_state(twin, env):
    """Put env, a highway-v0, into the state of twin at an episode's start. Returns what it observes."""
    from highway_env.vehicle.behavior import IDMVehicle
    from highway_env.vehicle.controller import MDPVehicle

    env.reset()
    env.road.vehicles = []
    for v in twin.pool.debug_states([0])[0].vehicles:
        lane = ("0", "1", LANES - 1 - v.target_lane_index)
        kind, more = (IDMVehicle, {"timer": v.timer}) if v.kind else (MDPVehicle, {})
        vehicle = kind(env.road, [v.x, MIDDLE - v.y], -v.heading, v.speed, lane, v.target_speed, **more)
        if v.kind:
            vehicle.DELTA = v.idm_delta
        env.road.vehicles.append(vehicle)
    env.vehicle = env.road.vehicles[0]
    env.define_spaces()  # of the new vehicle
    return env.observation_type.observe()


def same_start(twin, env, policy, episodes, rng):
    """Episodes of both from one start with the same actions. Returns the number of steps, how many of them agree, and how many
    episodes do in all their steps (an episode is left at the first step that does not)."""
    steps = equal = whole = 0
    for _ in range(episodes):
        obs, _ = twin.reset()
        agree, over = np.allclose(obs, copy_state(twin, env), rtol=0, atol=1e-6), False
        while agree and not over:
            action = policy(rng)
            ours, theirs = twin.step(action), env.step(action)
            agree = np.allclose(ours[0], theirs[0], rtol=0, atol=1e-5) and abs(ours[1] - theirs[1]) < 1e-5
            agree = agree and ours[2:4] == (bool(theirs[2]), bool(theirs[3]))
            over = ours[2] or ours[3]
            steps, equal = steps + 1, equal + bool(agree)
        whole += bool(agree)
    return steps, equal, whole


def play(env, policy, episodes, rng):
    """Statistics of episodes, {name: [episodes]}. The features are means over an episode's steps, as are their squares."""
    rows, moving = [], [k for k, name in enumerate(FEATURES) if "presence" not in name]
    for _ in range(episodes):
        env.reset()
        seen, rewards, over = [], [], False
        while not over:
            obs, reward, terminated, truncated, info = env.step(policy(rng))
            seen.append(obs.flatten())
            rewards.append(reward)
            over = terminated or truncated
        seen = np.array(seen, dtype=np.float64)
        features = [*seen.mean(0), *(seen[:, moving] ** 2).mean(0)]
        rows.append([sum(rewards), len(rewards), info["crashed"], np.mean(rewards), *features])
    names = ["return", "length", "crashed", "reward per step", *FEATURES, *(f"{FEATURES[k]} squared" for k in moving)]
    return dict(zip(names, np.array(rows, dtype=np.float64).T))


def compare(theirs, ours):
    """A row for each statistic that varies: mean and standard error of each, p of Student's t (that of one variance, which
    the two have if they agree) and of the test of Kolmogorov and Smirnov."""
    from scipy.stats import ks_2samp, ttest_ind

    for name in theirs:
        pair = theirs[name], ours[name]
        scale = np.std(np.concatenate(pair))
        if scale > 1e-6:
            shown = [number for x in pair for number in (x.mean(), x.std(ddof=1) / np.sqrt(len(x)))]
            # envpool's numbers are float32: without the last digits, or equal ones would differ in distribution
            a, b = (np.round(x / scale, 3) for x in pair)
            yield [name, *shown, ttest_ind(a - a[0], b - a[0]).pvalue, ks_2samp(a, b).pvalue]


def main(same=60, episodes=160, ours=2000, starts=3000):
    env, twin = highway_env(), EnvpoolHighway(vehicles_count=10)
    env.reset(seed=1)
    twin.reset(seed=2)
    rng = np.random.default_rng(3)

    rows = [[name, same, *same_start(twin, env, policy, same, rng)] for name, policy in POLICIES.items()]
    files.write_csv(RESULTS / "twin_steps.csv", ["policy", "episodes", "steps", "equal_steps", "equal_episodes"], rows)
    for row in rows:
        print("{}: {} episodes, {} steps, {} equal; {} episodes equal to their end".format(*row), flush=True)

    begun = [np.array([e.reset()[0].flatten() for _ in range(starts)], dtype=np.float64).T for e in (env, twin)]
    rows = [["start", *row] for row in compare(*(dict(zip(FEATURES, x)) for x in begun))]
    for name, policy in POLICIES.items():
        rows += [[name, *row] for row in compare(play(env, policy, episodes, rng), play(twin, policy, ours, rng))]
        print(f"{name}: played", flush=True)
    columns = ["policy", "statistic", "highway_env", "highway_env_se", "envpool", "envpool_se", "p_mean", "p_distribution"]
    files.write_csv(RESULTS / "twin.csv", columns, rows)
    print(table())


def table(results=RESULTS):
    """Markdown: the steps that agree, the main statistics of each policy, and what all the tests say together."""
    steps = {row["policy"]: row for row in files.read_csv(results / "twin_steps.csv")}
    rows = files.read_csv(results / "twin.csv")
    shown = ("return", "length", "crashed", "reward per step")
    lines = []
    for policy, row in steps.items():
        cells = [f"{row['equal_episodes']} of {row['episodes']}", f"{row['equal_steps']} of {row['steps']}"]
        for name in shown:
            found = [r for r in rows if (r["policy"], r["statistic"]) == (policy, name)]
            pairs = [[f"{float(r[k]):.3g} ± {float(r[k + '_se']):.2g}" for k in ("highway_env", "envpool")] for r in found]
            cells.append(" / ".join(pairs[0]) if pairs else "the same")
        lines.append([policy, *cells])
    p = np.array([[float(row["p_mean"]), float(row["p_distribution"])] for row in rows])
    said = [
        f"{len(column)} tests of {what}: {np.mean(column < 0.05):.1%} have p < 0.05, and the least p times their number is"
        f" {min(column.min() * len(column), 1):.2g}"
        for what, column in zip(("means", "distributions"), p.T)
    ]
    header = ["policy", "same start: equal episodes", "equal steps", *(f"{name}, highway_env / envpool" for name in shown)]
    return f"{files.table(header, lines)}\n\n{'; '.join(said)}."


if __name__ == "__main__":
    main()
