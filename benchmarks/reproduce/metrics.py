"""What is measured on the curves of two runs with the same seed, and how seeds are put together. Fixed before any result.

A curve is the returns of theta(k), k = 0..K: the evaluation at k is of the policy before round k, that at K of the policy
after the last round. Nothing is smoothed, but for a second version of each metric, on curves whose every value is the mean of
itself and the up to four before it (`smooth`).

- Levels: the strictly increasing running maxima of the standard run at k >= 1 that lie above its return at k = 0 (paper
  section 5.2). The peak is the highest of them. A standard run that never rises above its start has none: every metric that
  needs a level is nan for this seed, and such seeds are counted.
- m(v): the earliest k with a return of at least v. A level that the other run never reaches counts as m = K + 1, so that the
  reduction (1 - m_other(v) / m_standard(v)) * 100 is negative; the share of such levels is reported.
- SE_ave: the mean reduction over the levels. SE_peak: that at the peak.
- Seconds are those of rollout, scoring and update, without evaluation; the arm `random` scores only to know how many records
  to drop, so its scoring does not count. RT_peak, as the paper computes it: 1 - (the other run's seconds until it reaches the
  standard run's peak) / (the standard run's seconds for all its rounds). A second version divides by the standard run's own
  seconds to its peak. A peak never reached counts as one more round of the mean length.
- Final return: the mean of the last five evaluations (if K < 10: the last one).
- Area under the curve: the mean of all K + 1 evaluations.
- Normalised score: (return - low) / (high - low), with the fixed values of REFERENCE.
- A run is stalled if more than half of its evaluations at k >= 1 have a normalised score below 0.05; it is stalled at the end
  if its final return has.
- A run has broken down if, after a normalised score of at least 0.95, one is below 0.5.
- Over seeds: mean, standard error (standard deviation with n - 1, over sqrt(n)), and the 95% interval mean +- t * SE with the
  0.975 quantile of Student's t for n - 1 degrees of freedom.
"""

import numpy as np

REFERENCE = {  # environment: (low, high), returns that score 0 and 1
    "FrozenLake": (0.0, 1.0),
    "Acrobot": (-500.0, -80.0),
    "MiniGrid": (0.0, 0.95),
    "Highway": (0.0, 25.0),
    "LunarLander": (-200.0, 200.0),
    "BipedalWalker": (-100.0, 200.0),
}
STALLED = 0.05  # normalised score


# ---- of curves


def smooth(returns, width=5):
    """Trailing mean: every value becomes the mean of itself and the up to width - 1 before it."""
    return np.array([np.mean(returns[max(0, k - width + 1) : k + 1]) for k in range(len(returns))])


def levels(returns):
    """The levels of a standard run, ascending."""
    found, best = [], returns[0]
    for value in returns[1:]:
        if value > best:
            found.append(value)
            best = value
    return np.array(found)


def rounds_to(returns, level):
    """m(v), and whether the run reached the level."""
    reached = np.flatnonzero(np.asarray(returns) >= level)
    return (int(reached[0]), True) if len(reached) else (len(returns), False)


def sample_efficiency(standard, other):
    """SE_ave and SE_peak in percent, and the share of levels that `other` never reached; nan where there is no level."""
    reductions, missed = [], []
    for level in levels(standard):
        m, reached = rounds_to(other, level)
        reductions.append(100 * (1 - m / rounds_to(standard, level)[0]))
        missed.append(not reached)
    if not reductions:
        return {"SE_ave": np.nan, "SE_peak": np.nan, "missed": np.nan}
    return {"SE_ave": np.mean(reductions), "SE_peak": reductions[-1], "missed": np.mean(missed)}


def seconds_to(returns, seconds, level):
    """Seconds until theta(m(v)) is there; `seconds`: [K], those of each round."""
    m, reached = rounds_to(returns, level)
    return np.sum(seconds[:m]) + (0 if reached else np.mean(seconds))


def run_time(standard, other, standard_seconds, other_seconds):
    """RT_peak in percent: against all the standard run's seconds, as the paper, and against its own seconds to its peak."""
    if not len(levels(standard)):
        return {"RT_peak": np.nan, "RT_peak_own": np.nan}
    peak = levels(standard)[-1]
    spent = seconds_to(other, other_seconds, peak)
    return {
        "RT_peak": 100 * (1 - spent / np.sum(standard_seconds)),
        "RT_peak_own": 100 * (1 - spent / seconds_to(standard, standard_seconds, peak)),
    }


def final_return(returns):
    return np.mean(returns[-5:]) if len(returns) > 10 else returns[-1]


def area(returns):
    return np.mean(returns)


def normalise(environment, returns):
    low, high = REFERENCE[environment]
    return (np.asarray(returns) - low) / (high - low)


def broken_down(environment, returns):
    """The first k of a normalised score below one half after one of at least 0.95; inf if there is none, None if it never was."""
    scores = normalise(environment, np.asarray(returns))
    solved = np.flatnonzero(scores >= 0.95)
    if not len(solved):
        return None
    lost = np.flatnonzero(scores[solved[0] :] < 0.5)
    return solved[0] + lost[0] if len(lost) else np.inf


def stalled(environment, returns):
    return np.mean(normalise(environment, returns[1:]) < STALLED) > 0.5


def stalled_at_end(environment, returns):
    return normalise(environment, final_return(returns)) < STALLED


# ---- over seeds


def t_interval(values):
    """Mean, standard error and half-width of the 95% interval of what is not nan; nan for what too few values cannot tell."""
    values = np.asarray(values, dtype=float)
    values = values[~np.isnan(values)]
    n = len(values)
    if n < 2:
        return (values[0] if n else np.nan), np.nan, np.nan
    error = values.std(ddof=1) / np.sqrt(n)
    return values.mean(), error, t_quantile(n - 1) * error


def t_quantile(degrees):
    from scipy.stats import t

    return t.ppf(0.975, degrees)


def interquartile_mean(scores, reps=2000):
    """IQM of normalised scores [seeds, environments], and its 95% interval by rliable's stratified bootstrap."""
    from rliable import library, metrics

    return _bootstrap(library, scores, metrics.aggregate_iqm, reps)


def probability_of_improvement(scores, others, reps=2000):
    """Probability that a run of `scores` [seeds, environments] beats one of `others`, a tie counting half, averaged over the
    environments, and its 95% interval by rliable's bootstrap. (rliable's own function of this number is a hundred times
    slower.)"""
    from rliable import library

    return _bootstrap(library, (scores, others), lambda x, y: np.mean((x[:, None] > y) + 0.5 * (x[:, None] == y)), reps)


def _bootstrap(library, scores, statistic, reps):
    np.random.seed(0)  # rliable draws from numpy's global generator
    points, intervals = library.get_interval_estimates({"": scores}, lambda *x: np.array([statistic(*x)]), reps=reps)
    return float(points[""][0]), *(float(x) for x in intervals[""][:, 0])
