"""Output of a run: its folder, display, metrics and statistics.

run_folder, run_store   the folder of a run, its lock, and the files in it
repeated_steps          steps that a resumed run samples again, compared with their records
run_state               the state of a run, and the runs below a folder
records                 the lines of rollouts and held-out answers
run_overview            the list of runs
rollout_choice, rollout_text, rollout_export   rollouts in a terminal and as a table
pruning                 removal of old checkpoints
report                  the HTML report of runs
metrics                 every number of a training step, defined once
console, notebook       the live display of a run
run_result              the result of a run in Python
trackers                TensorBoard, Weights & Biases, trackio, MLflow
wording, score_kinds    the texts and number formats of the display
statistics, curve       confidence intervals; the picture of a run
reports                 the output of `covey eval`
reliability             the reliability diagram of a reward model
iterations              the picture of an iterative run
"""
