"""The routes of `covey watch`. All are GET (or HEAD), all but the page itself and recordings answer JSON.

Conventions: keys are snake_case. A key with null has no known value: the run is older than that record, or has not
got so far. NaN and infinities are null. A page must ignore keys that it does not know. `{id}` is a run's "id": opaque,
URL-safe, and the same after a restart of the server. Errors have a status of 400 (a parameter is wrong), 403 (refused:
another site, a link that leads out of the run folder), 404 (no such run, step, group or file), 405, 413 (the file is
too large to show), 414, 431 or 500, and the body

    {"error": {"reason": "not_found", "message": "one line"}}

GET /                      the page: static/index.html
GET /static/{path}         its modules, styles and pictures (html, js, css, svg, png, woff2, txt, json, map)

GET /api/runs              all watched runs, those that changed last first
    {"runs": [RUN, ...],
     "root": "/home/me/runs" | null,                 the folder whose runs are shown, null if runs were named
     "version": "0.1.0"}                             covey's

  RUN = {"id": "arithmetic_grpo-001.3f9ac1",
         "name": "arithmetic_grpo-001",              unique among the runs, as short as possible
         "path": "/home/me/runs/arithmetic_grpo-001",
         "state": "running" | "finished" | "stopped" | "crashed",
         "domain": "language" | "control" | null,    null: config.toml is missing or damaged
         "score_kind": "accuracy" | "score" | "return" | null,
         "recipe": "arithmetic_grpo" | null,
         "seed": 0 | null,
         "last_step": 31,                            0 before the first step
         "steps": 60 | null,                         planned
         "updated": 1764036125.2 | null,             Unix seconds of the last change
         "generation": 0,                            grows when recorded steps were taken back (a resume) or the folder
                                                     was made anew: forget what was fetched of this run
         "result": {"before": ESTIMATE | null, "after": ESTIMATE | null} | null,   at the training's token limit;
                                                     "after" is the last evaluation so far
         "score": 0.62 | null}                       score/mean of the last step
  ESTIMATE = {"score": 0.62, "low": 0.56 | null, "high": 0.68 | null, "count": 256 | null}

GET /api/runs/{id}         one run: RUN and
    {"config": {...} | null,                         config.toml as tables
     "summary": {...} | null,                        summary.json, else stopped.json
     "evaluations": [{"max_new_tokens": 14 | null, "before": ESTIMATE | null, "after": ESTIMATE | null}, ...],
     "metrics": [{"name": "reward/mean", "unit": "reward", "meaning": "...", "healthy": "..."}, ...],
                                                     those that the run has, in the order of the glossary
     "wording": {"measured": "problem", "evaluation": "held-out accuracy, greedy", "x_metric": "step",
                 "x_label": "training step", "prompt": "prompt", "score_name": "accuracy", "counted": "tokens"} | null,
     "steps_with_rollouts": [[1, 31], [35, 40]],     ranges, both ends included
     "held_out_steps": [0, 20, 40],
     "token_limits": [14, 96],                       of the held-out answers; the first is the training's
     "records_tokens": false,                        the last step's rollouts have "tokens"
     "iterations": [{...}, ...],                     lines of iterations.jsonl; [] if the run is not iterative
     "files": [{"name": "curve.png", "bytes": 52113, "kind": "image", "type": "image/png"}, ...],
     "index": INDEX}
  INDEX = {"state": "absent" | "building" | "ready", "files": 120, "indexed": 84}  files of rollouts. Until it is ready,
                                                     /rollouts sees the indexed ones (and the newest) alone

GET /api/runs/{id}/metrics?names=reward/mean,entropy&points=600&after=0&last=84
    Steps after `after` up to `last`, in at most `points` (2 to 5000, default 600) buckets of about equal numbers of
    steps. Without `names` all metrics of the run.
    {"last_step": 84, "generation": 0, "downsampled": false,
     "steps": [1, 2, ...],                           last step of each bucket
     "first_steps": [1, 2, ...],                     its first step
     "series": {"reward/mean": {"mean": [0.1, null, ...], "low": [...], "high": [...]}, ...}}
    "low" and "high" are the least and the largest value in the bucket, and absent unless downsampled. A bucket without
    a value of the metric has null. A name that the run does not have is left out. For another x axis ask for its metric
    (environment/steps): the "mean" of each bucket belongs to the "mean" of the others.

GET /api/runs/{id}/steps/{step}/groups
    {"step": 12, "groups": [{"group": 0, "size": 8, "reward_mean": 0.5 | null, "reward_low": 0.0 | null,
      "reward_high": 1.0 | null, "reward_std": 0.5 | null, "score_mean": 0.5 | null, "baseline": 0.5 | null,
      "signal": true, "truncated": 1, "failed": 0, "dropped": false, "decisions_mean": 10.5 | null,
      "prompt": "the first 200 characters"}, ...],
     "damaged": 0}                                   lines that could not be read
    "signal": the rewards differ, so that the group has a gradient. Numbers are over graded rollouts.

GET /api/runs/{id}/steps/{step}/groups/{group}
    {"step": 12, "group": 0, "prompt": "..." | [{"role": "user", "content": "..."}, ...] | null, "columns": {...},
     "baseline": 0.5 | null, "signal": true, "dropped": false, "rollouts": [ROLLOUT, ...]}
  ROLLOUT = {"index": 0,                             within the group
      "text": "...", "reward": 1.0 | null, "reward_parts": {"numeric": 1.0}, "score": 1.0 | null,
      "advantage": 0.9 | null, "baseline": 0.5 | null,
      "end": "stop" | "terminated" | "length" | "truncated" | "cut", "truncated": false, "failed": false,
      "decisions": 12, "version": 11 | null, "extra": {...} | null, "undecided": [[5, 9]] | null,
      "steps": [["text of a step", 0.5], ...] | null,
      "tokens": {"ids": [...], "texts": [...], "logprobs": [...], "reference_logprobs": [...] | null,
                 "advantages": [...], "updated_logprobs": [...] | null} | null}

GET /api/runs/{id}/rollouts?filter=best&text=apple&first=1&last=84&offset=0&limit=50
    filter: best (reward, highest first), worst, truncated, failed, no_signal; without it the newest first.
    text: a part of the completion or of the prompt; case is ignored. limit: 1 to 200.
    {"total": 8123 | null,                           null: not counted, because too many must be read
     "offset": 0, "next_offset": 50 | null,          null: no more
     "rollouts": [{"step": 12, "group": 0, "index": 3, "reward": 1.0 | null, "score": ..., "advantage": ...,
       "end": "stop", "truncated": false, "failed": false, "signal": true, "decisions": 12,
       "reward_parts": {...}, "prompt": "200 characters", "text": "400 characters around the match",
       "text_from": 0,                               position of that excerpt in the completion
       "match": [3, 8] | null}, ...],                positions in "text"; null if the match is in the prompt
     "index": INDEX}

GET /api/runs/{id}/held_out?first=0&last=40&max_new_tokens=14&offset=0&limit=200&order=worse&kind=worse&text=
    Held-out answers of two evaluations beside each other. first, last: steps of "held_out_steps" (default: the first
    and the last). order: better (largest gain first), worse, problem (default). kind: better, worse, same, truncated.
    {"first": 0, "last": 40, "max_new_tokens": 14, "count": 256, "total": 12,      total: after `kind` and `text`
     "offset": 0, "next_offset": null, "changes": {"better": 120, "worse": 9, "same": 127, "unknown": 0},
     "answers": [{"problem": 0, "prompt": "..." | [...], "columns": {...}, "first": ANSWER | null,
                  "last": ANSWER | null, "change": 1.0 | null}, ...]}
  ANSWER = {"text": "...", "reward": 1.0 | null, "score": 1.0 | null, "reward_parts": {...}, "tokens": 9,
            "truncated": false, "extra": {...} | null}

GET /api/runs/{id}/diagnosis
    {"step": 84, "findings": [{"check": "entropy_collapse", "severity": "warning" | "problem", "first_step": 40,
      "last_step": 84, "evidence": "...", "explanation": "...", "remedy": "...", "metrics": ["entropy"]}, ...],
     "available": true}                              false: nothing can be said yet

GET /api/runs/{id}/files/{name}   a file of "files": a picture or recording of the run (png, gif, jpg, webp, mp4, webm).

GET /api/events            server-sent events, at once and then whenever something changes:
    event: run       data: {"id", "state", "last_step", "generation", "updated"}       it appeared, grew, or ended
    event: gone      data: {"id"}                                                      its folder was deleted
    event: index     data: {"id", "index": INDEX}
    A comment line every 15 seconds keeps the connection. It ends when the server ends.
"""

from __future__ import annotations
