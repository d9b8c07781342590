"""Experiment trackers: every metric, the config, the summary and sampled rollouts, in the user's own tracker.

The run folder is the record of a run, and a tracker has a copy of a part of it. If a tracker misses steps, because it
fails or the process is killed, a resumed run sends them from the folder.
"""

from covey.tracking.trackers.observer import Trackers, open_trackers

__all__ = ["Trackers", "open_trackers"]
