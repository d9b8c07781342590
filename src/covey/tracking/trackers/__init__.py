"""Experiment trackers: every metric, the config, the summary and sampled rollouts, in the user's own tracker.

observer                             the observer of the loop; the table of trackers
tracker                              what a tracker is given, and the protocol of its adapter
thread                               calls a tracker, so that its faults and its speed do not reach the training
rows                                 the rollouts that a tracker shows
tensorboard, wandb, trackio, mlflow  one adapter each; the only files that import these packages

The run folder is the record of a run, and a tracker has a copy of a part of it. If a tracker misses steps, because it
fails or the process is killed, a resumed run sends them from the folder.
"""

from covey.tracking.trackers.observer import Trackers, open_trackers

__all__ = ["Trackers", "open_trackers"]
