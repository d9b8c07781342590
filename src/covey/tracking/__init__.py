"""Output of a run: its folder, display, metrics and statistics.

run_folder                     the folder of a run: its files, its lock, its state, and the runs below a folder
run_store, run_reader          write a run folder; read it and follow it while it is written
evaluations                    held-out evaluations, and a choice of rollouts
rollout_text, rollout_export   rollouts in a terminal and as a table
run_overview                   the list of runs, and the removal of old checkpoints
console, output                the live display of a run, also in a notebook; its result in Python
wording                        the texts and number formats of the display
metrics, statistics            every number of a training step, defined once; confidence intervals
curve                          the pictures of runs and of reward models
diagnosis, trackers            checks of the metrics; TensorBoard, Weights & Biases, trackio, MLflow
"""
