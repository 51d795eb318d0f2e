#!/usr/bin/env bash
# From a fresh clone to a trained model with one command:
#
#   bash scripts/quickstart.sh [key=value ...]
#
# Makes a virtual environment in .venv, installs dtrain, makes tar shards of scikit-learn's handwritten digits (no
# download) and trains a small CNN on them with two DDP processes. What is done already is not done again: a second
# call continues the run, or says that it is finished. Further arguments go to dtrain.train, such as precision=bf16;
# paths in them are relative to the checkout.
#
#   PYTHON=python3.11     the interpreter to make the environment with
#   DTRAIN_VENV=DIR       another place for the environment, or one that you have already
set -euo pipefail
# shellcheck source=scripts/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

prepare demo
cd "$root"

ranks=2
OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(threads "$ranks")}
export OMP_NUM_THREADS
if has_nvidia_gpu && [[ $("$venv/bin/python" -c 'import torch; print(torch.cuda.device_count())') == 1 ]]; then
  say "One GPU cannot hold two ranks, and two ranks are what this shows, so they run on the CPU. To use the GPU:"
  say "  $venv/bin/torchrun --standalone --nproc-per-node=1 -m dtrain.train experiment=digits"
  export CUDA_VISIBLE_DEVICES=
fi

# Shown whole, because it is the command to go on with.
command=("$venv/bin/torchrun" --standalone "--nproc-per-node=$ranks" -m dtrain.train experiment=digits "$@")
say "OMP_NUM_THREADS=$OMP_NUM_THREADS ${command[*]}"
"${command[@]}"
say "In that directory: config.yaml, metrics.jsonl, checkpoints/, logs/, wandb/, status.json."
say "The shards are in ${DTRAIN_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/dtrain}/digits. The tests: bash scripts/test.sh"
