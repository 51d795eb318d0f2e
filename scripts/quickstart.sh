#!/usr/bin/env bash
# Trains a first model from a fresh clone with one command:
#
#   bash scripts/quickstart.sh [key=value ...]
#
# Makes a virtual environment in .venv, installs dtrain, writes scikit-learn's handwritten digits as tar shards (no
# download) and trains a small CNN on them with two DDP processes. Finished steps are skipped: a second call resumes the
# run, or reports that it is finished. Arguments such as precision=bf16 are passed to dtrain train; paths in them are
# relative to the checkout.
#
#   PYTHON=python3.11     the interpreter that makes the environment
#   DTRAIN_VENV=DIR       another folder for the environment, or an existing environment
set -euo pipefail
# shellcheck source=scripts/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

prepare demo
cd "$root"

ranks=2
OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(threads "$ranks")}
export OMP_NUM_THREADS
if has_nvidia_gpu && [[ $("$venv/bin/python" -c 'import torch; print(torch.cuda.device_count())') == 1 ]]; then
  say "This example trains with two ranks, and two ranks need two GPUs, so it runs on the CPU. To use the GPU:"
  say "  $venv/bin/dtrain train experiment=digits"
  export CUDA_VISIBLE_DEVICES=
fi

# Printed, because it is also the command that resumes the run.
command=("$venv/bin/dtrain" train --nproc "$ranks" experiment=digits "$@")
say "OMP_NUM_THREADS=$OMP_NUM_THREADS ${command[*]}"
"${command[@]}"
say "The run directory has config.yaml, metrics.jsonl, checkpoints/, logs/, wandb/ and status.json."
say "The shards are in ${DTRAIN_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/dtrain}/digits. To run the tests: bash scripts/test.sh"
