#!/bin/bash
# A process reward model from continuation labels, and GRPO with it as the only reward: the table of
# docs/reward_models.md. About 70 minutes on two cores; run it in an empty folder, with covey on the PATH.
set -e

covey train outcome_grpo --seed 1 --token-budget 40000 --run-dir runs/policy
covey train outcome_grpo --seed 2 --token-budget 60000 --model runs/policy --run-dir runs/completer
covey reward-model label process_grpo --model runs/policy --completer runs/completer --output a.jsonl \
    --prompts 192 --completions 6 --continuations 4 --estimate soft
covey reward-model label process_grpo --model runs/policy --completer runs/completer --output b.jsonl \
    --prompts 40 --completions 6 --continuations 4 --estimate soft --seed 1
covey reward-model label process_grpo --completer runs/completer --output c.jsonl \
    --prompts 96 --completions 4 --continuations 4 --estimate soft --seed 2
covey reward-model label process_grpo --model runs/policy --completer runs/completer --output d.jsonl \
    --prompts 480 --completions 3 --continuations 4 --estimate soft --seed 5
cat a.jsonl c.jsonl b.jsonl > abc.jsonl
cat abc.jsonl d.jsonl > abcd.jsonl

# The examples that the first two trainings hold out, with the labels of continuations and with the exact ones.
cat > exact.py <<'END'
import json

from covey.llm.data.reward_examples import read_examples
from covey.llm.data.rows import hold_out
from covey.llm.rewards.numbers import read_number

examples = read_examples("abc.jsonl", "grade")
held_out = {example.place for example in hold_out(examples, 0.12, one_prompt="one prompt")[1]}
with open("abc.jsonl") as labels:
    lines = [line for line, example in zip(labels, examples, strict=True) if example.place in held_out]
with open("held_out.jsonl", "w") as same, open("exact.jsonl", "w") as exact:
    for line in lines:
        row = json.loads(line)
        totals = [read_number(str(total)) for total in row["columns"]["totals"]]
        right = [n < len(totals) and read_number(text) == totals[n] for n, text in enumerate(row["completions"])]
        right[-1] = row["right"]
        same.write(line)
        exact.write(json.dumps({**row, "labels": [float(one) for one in right]}) + "\n")
END
python exact.py

covey reward-model train abc.jsonl --held-out-fraction 0.12 --model runs/completer --run-dir runs/prm1 \
    --epochs 3 --batch-size 16 --learning-rate 1e-4 --warmup-steps 10
covey reward-model train abc.jsonl --held-out-fraction 0.12 --model runs/prm1 --run-dir runs/prm2 \
    --epochs 3 --batch-size 16 --learning-rate 4e-5 --warmup-steps 5 --seed 1
covey reward-model train abcd.jsonl --held-out held_out.jsonl --overlap drop --model runs/prm2 --run-dir runs/prm3 \
    --epochs 2 --batch-size 16 --learning-rate 6e-5 --warmup-steps 5 --seed 2
for model in runs/prm1 runs/prm2 runs/prm3; do
    covey reward-model eval $model exact.jsonl
    covey reward-model eval $model held_out.jsonl
done

cat > prm.toml <<'END'
model = "runs/policy"
steps = 24
token_budget = 40000

[task]
name = "running_total"
steps = [3]
largest = 5

[[rewards]]
model = "runs/prm3"
aggregate = "min"

[[rewards]]
name = "numeric"                     # the true reward: measured, not trained on
weight = 0.0
score = true

[process]
boundary = "line"

[sampling]
prompts_per_step = 8
group_size = 8
max_new_tokens = 30

[loss]
kl_coefficient = 0.2

[update]
learning_rate = 1.5e-5
schedule = "linear"
warmup_steps = 3

[evaluation]
problems = 128
END
covey train prm.toml --run-dir runs/prm_grpo
