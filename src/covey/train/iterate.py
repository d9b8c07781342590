"""Iterative GRPO: the reward model is trained between iterations of the policy's training.

DeepSeekMath (arXiv 2402.03300), algorithm 1, with the lines of the paper:

    for iteration = 1 .. I                       line 2
        reference <- policy                      line 3       Components.reference_updater, after the step before
        for step = 1 .. M                        lines 4-10   `train`
        reward model <- continued training       line 11      Components.reward_model

The algorithm of the steps may be any other, such as PPO.
"""

from collections.abc import Callable
from dataclasses import replace

from covey.train.loop import train
from covey.train.state import Components, LoopConfig, Progress, save_checkpoint


def iterate(run: Components, config: LoopConfig, progress: Progress, *, should_stop: Callable[[], bool]) -> None:
    """Train for iterations of `config.iteration_steps` steps, until `config.is_done` or `should_stop()`.

    A checkpoint follows each training of the reward model, also one that was stopped. An iteration that the decision
    budget cuts short has no training of the reward model.

    Raises:
        RunError: as `train`.
    """
    while not should_stop():
        finished, begun = divmod(progress.step, config.iteration_steps)
        if not begun and run.reward_model.iterations < finished:
            run.reward_model.update(should_stop)
            save_checkpoint(run, progress)
        elif config.is_done(progress):
            return
        else:
            end = min(config.steps, (finished + 1) * config.iteration_steps)
            train(run, replace(config, steps=end), progress, should_stop=should_stop)
