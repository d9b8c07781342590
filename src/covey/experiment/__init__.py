"""From a config to a run and its summary.

run                  train, resume, check
build                what both worlds are built from: algorithm, optimizer, update plan
llm, control         the components of a run on a language model (llm_components), and on an environment
evaluate_llm         greedy answers to held-out problems
inference            `covey eval` of a model
plan                 `covey plan`
resuming, advice     taking a run up again; the command that a user may type next
"""
