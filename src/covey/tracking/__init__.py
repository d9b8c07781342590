"""What a run writes and shows.

run_folder, run_store   the folder of a run, its lock, and the files in it
metrics                 every number of a training step, defined once
console, notebook       what a person sees while a run goes on
wording, score_kinds    the words in which a run is told
statistics, curve       intervals; a run as one picture
reports                 what `covey eval` prints
"""
