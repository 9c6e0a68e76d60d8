"""The suite `rlhf_grpo`: GRPO with and without influence, reward against KL as in the suite `rlhf_kl`, beside its plain PPO."""

from benchmarks.reproduce import rlhf_kl
from benchmarks.reproduce.entries import Entry, Suite
from benchmarks.reproduce.rlhf import COLUMNS, load

ARMS = {
    "GRPO": "--filter none",
    "GRPO, f_seq, fresh": "--filter influence --target seq --validation-prompts 128",
}
COEFS = (0.2, 0.1, 0.4, 0.28)  # of the KLs of the suite `rlhf_kl`'s plain PPO, and a little beyond


def read(suite, results):
    """What is finished, and plain PPO of the suite `rlhf_kl`."""
    ppo = {arm.replace("none", "PPO"): runs for arm, runs in load(rlhf_kl.SUITE, results).items() if arm.startswith("none")}
    own = load(suite, results)
    return own and {**ppo, **own}


SUITE = Suite(
    "rlhf_grpo",
    "Language models: GRPO",
    "Does filtering help GRPO? The setting of the suite `rlhf_kl` with `--advantage grpo`: a round is 8 answers to each of 16 prompts,"
    " `--kl-coef` weighs the KL penalty in the loss. `GRPO`: nothing is dropped; `f_seq, fresh`: all records of negative influence on"
    " f_seq of 128 fresh answers (8 to each of 16 held-out prompts) are. `PPO`: the arm `none` of the suite `rlhf_kl`, whose"
    " coefficients are of another scale.",
    [
        Entry(
            "reviews",
            "ppo_iif_rlhf",
            "--no-cuda --optimizer adam --learning-rate 0.0001 --batch-size 128 --minibatch-size 4 --eval-prompts 128"
            " --eval-model-name tiny --no-adaptive-kl --advantage grpo --group-size 8",
            40,
            {
                f"{arm}, kl {coef:g}": f"{flags} --filter-percent 100 --kl-coef {coef:g}"
                for coef in COEFS
                for arm, flags in ARMS.items()
            },
            seeds=3,
            records=128,
            returns="eval/reward",
            columns=tuple(COLUMNS.items()),
        )
    ],
    lambda data: rlhf_kl.tables(data, "GRPO", "GRPO"),
    caption="A point is one coefficient of the KL penalty, a curve an arm; mean and standard error over seeds.",
    timed=True,
    read=read,
    picture=rlhf_kl.draw,
)
