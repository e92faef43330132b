#!/usr/bin/env bash
# The loop by hand: three steps of the five stages, each a command of its own. Between any two of
# them the shards can be looked at, changed or compared. It leaves the same bytes as
#   skyrl loop --preset quickstart --steps 3 --set loop.eval_every=0 --run DIR
# Usage: examples/by_hand.sh DIR
set -euo pipefail
run=${1:?name a run directory}
steps=${STEPS:-3}

# Settings can also be given to each command; a file says them once.
skyrl init --run "$run" --preset quickstart
for ((step = 0; step < steps; step++)); do
  skyrl rollout --run "$run"
  skyrl score --run "$run"
  skyrl advantage --run "$run"
  skyrl train --run "$run"
  skyrl sync --run "$run"
done
skyrl show "$run"
