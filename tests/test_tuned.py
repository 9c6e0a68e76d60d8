"""Equal footing: what a run is judged by, the rule of choice, and the verdict, against numbers worked out by hand."""

from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks import run
from benchmarks.reproduce import tuned


def rows(*returns):
    stages = {f"{stage}_seconds": "0.5" for stage in ("rollout", "scoring", "update")}
    return [{"return": x, "kl": "0.01", "agreement": "", "noise_scale": "", **stages} for x in returns]


def test_a_round_without_an_episode_counts_as_the_one_before():
    c = tuned.curve(rows("", "2", "", "", "5"))
    assert c.returns.tolist() == [2, 2, 2, 2, 5] and tuned.area(c) == pytest.approx(13 / 5)
    assert tuned.final(c) == 5 and tuned.final(tuned.curve(rows(*map(str, range(20))))) == 18.5
    assert c.seconds.tolist() == [1.5] * 5 and np.isnan(c.agreement).all()
    assert np.isnan(tuned.curve(rows("", "")).returns).all()


def test_training_rows():
    """Rounds of 10 steps; an episode that ends with a round is logged at its end."""
    events = [SimpleNamespace(step=step, value=value) for step, value in ((4, 1.0), (10, 3.0), (25, 7.0))]
    fake = SimpleNamespace(rounds=3)
    columns = [{}, {}, {10: 0.1, 20: 0.1, 30: 0.1}, {}, {10: 0.2, 20: 0.2, 30: 0.2}]
    found = run.training_rows(fake, events, [10, 20, 30], ["suite"], columns, [{20: 0.25}])
    assert [row[1:5] for row in found] == [[0, 0, "2", 2], [1, 10, "", 0], [2, 20, "7", 1]]
    assert found[1][-1] == "0.25" and found[0][5] == "10"  # an arm that does not score keeps all
    with pytest.raises(ValueError, match="3 rounds, expected 4"):
        run.training_rows(SimpleNamespace(rounds=4), events, [10, 20, 30], [], columns, [])


def data(**areas):
    """{arm: its areas}, one seed each."""
    return {arm: {i: tuned.curve(rows(str(a))) for i, a in enumerate(values, start=1)} for arm, values in areas.items()}


def grid(kind, *areas):
    return {f"{kind}, lr x {f:g}": [a, a, a] for f, a in zip(tuned.RATES, areas)}


def test_the_rule():
    arms = grid("none", 1, 3, 2, 0) | grid("influence", 1, 2, 2, 2)
    assert tuned.choose({"Acrobot": data(**arms)}) == [["Acrobot", "1", "1", ""]]  # of equal ones the smaller rate
    for area, percent in ((2.0, "12.5"), (2.1, "50")):
        half = {"influence 50%, lr x 1": [area] * 3}
        assert tuned.choose({"Acrobot": data(**arms, **half)}) == [["Acrobot", "1", "1", percent]]
    arms["influence, lr x 4"] = [9, 9]  # a seed is missing
    assert tuned.choose({"Acrobot": data(**arms)}) == []


def test_the_verdict():
    arms = data(none=[1, 2, 3, 4], influence=[2, 3, 4, 5.2], random=[0, 4, 2, 6])
    text = tuned.verdict("Acrobot", arms)
    assert "ahead of `none` (1.05 [0.891, 1.21])" in text and "not told apart from `random`" in text
    assert "behind `none`" in tuned.verdict("Acrobot", arms | {"influence": data(x=[0, 1, 2, 3.1])["x"]})
    assert "not enough seeds" in tuned.verdict("Acrobot", data(none=[1], influence=[2]))


def test_rates_beyond_the_grid_are_compared_on_the_same_seeds(monkeypatch):
    monkeypatch.setattr(tuned, "load", lambda *_: {"LunarLander": data(none=[1, 2, 9], influence=[3, 4, 9], random=[0, 0, 0])})
    monkeypatch.setattr(tuned, "read_chosen", lambda: {"LunarLander": {"none": "4", "influence": "4", "percent": "12.5"}})
    (text,) = tuned.beyond_tables({"LunarLander": data(**{"none, lr x 8": [2, 3.2]})})
    rows = {
        cells[2].strip(): [c.strip() for c in cells[3:-1]] for cells in (line.split("|") for line in text.splitlines()[2:])
    }
    assert rows["none, lr x 4"][:2] == ["2", "1.5 ± 0.5"] and rows["none, lr x 4"][-1] == "2 [2, 2]"
    assert rows["none, lr x 8"][-1].startswith("0.9 [") and rows["influence, lr x 4"][-1] == ""
    assert not any(arm.startswith("random") for arm in rows)


def test_a_rule_passes_that_is_ahead_of_both_in_every_environment(monkeypatch):
    tuning = {"none, lr x 1": [1, 2, 3], "influence 50%, lr x 2": [2, 2, 3], "influence, lr x 2": [9, 9, 9]}
    monkeypatch.setattr(tuned, "load", lambda *_: dict.fromkeys(("Acrobot", "DoorKey"), data(**tuning)))
    row = {"none": "1", "influence": "2", "percent": "50"}
    monkeypatch.setattr(tuned, "read_chosen", lambda: {"Acrobot": row, "DoorKey": row})
    first = {"previous": [1, 2, 3], "previous, own lr x 2": [2, 3, 3], "scaled": [1, 2, 3.5]}  # scaled: ahead of none only
    first["average"] = [2, 9]  # a seed is missing
    text = tuned.rules_verdict({"Acrobot": data(**first), "DoorKey": data(previous=[4, 4, 4], scaled=[0, 3, 3])})
    assert "Passed: previous of 7" in text and text.endswith("previous, own lr x 2 on Acrobot; previous on DoorKey")
    first["previous, own lr x 2"] = [2, 2, 2.9]
    assert "Passed: none of 7. Ahead of both anywhere: previous on DoorKey" in tuned.rules_verdict(
        {"Acrobot": data(**first), "DoorKey": data(previous=[4, 4, 4])}
    )


def test_arms_differ_in_filter_and_rate_only():
    for suite in tuned.SUITES:
        for entry in suite.entries:
            for arguments in entry.arms.values():
                options = set(arguments.split()[::2])
                more = {"rules": {"--script", "--rule"}, "beyond": {"--clip-coef"}}
                own = {"--filter", "--filter-percent", "--learning-rate"} | more.get(suite.name, set())
                assert options <= own and not options & set(entry.arguments.split())
