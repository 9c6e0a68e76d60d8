"""Rewards for `--reward toy_rewards:NAME`."""

import os
import signal

interrupt_in = -1  # calls, this one included


def lengths(prompts, responses):
    """Words of the prompt and of the response; one call of it can interrupt the run."""
    global interrupt_in
    interrupt_in -= 1
    if interrupt_in == 0:
        os.kill(os.getpid(), signal.SIGINT)
    return [len(prompt.split()) + len(response.split()) for prompt, response in zip(prompts, responses)]


def of_prompts(prompts, responses):
    """A tenth for each character of the prompt, whatever the response is."""
    return [0.1 * len(prompt) for prompt in prompts]
