#!/usr/bin/env bash
# Three steps, an evaluation and an export, as cron runs them: without a terminal, from any folder, with nothing in the
# environment but PATH. It needs jq. Called again, it makes the next three steps of the run.
# Usage: examples/cron.sh PYTHON RUN [flags of `skyrl init`]
set -euo pipefail
python=${1:?name the Python that nanoskyrl is installed for}
run=${2:?name a run directory}
shift 2
skyrl() { "$python" -m nanoskyrl_cli "$@"; }
number() { jq --exit-status ".numbers[\"$1\"]"; }

[ -f "$run/run.toml" ] || skyrl init --run "$run" --preset quickstart "$@"
for _ in 1 2 3; do
  rollout=$(skyrl rollout --run "$run" --json | jq --raw-output .output)
  reward=$(skyrl score "$rollout" --run "$run" --json | number reward/avg_raw_reward)
  rows=$(skyrl advantage --run "$run" --json | number advantage/kept)
  loss=$(skyrl train --run "$run" --json | number train/loss)
  policy=$(skyrl sync --run "$run" --json | jq --raw-output .output)
  echo "reward $reward, $rows rows, loss $loss: $policy"
done

evaluation=$(skyrl eval --run "$run" --json)
echo "success $(jq '.numbers[].success' <<<"$evaluation") in $(jq --raw-output '.output[]' <<<"$evaluation")"
skyrl export "$run" --to "$policy-exported" --json | jq --raw-output .output
