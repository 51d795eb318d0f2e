#!/usr/bin/env bash
# Installs what the tests need and runs them:
#
#   bash scripts/test.sh [pytest arguments]
#
# Without arguments the default set, a few minutes on two cores; with `-m slow` the long ones. Two files of tests run at a
# time, since most tests wait for processes of their own; `-n 0` runs one after the other, with all output at once. Paths are
# relative to the checkout. PYTHON and DTRAIN_VENV as in quickstart.sh, whose environment this one shares.
set -euo pipefail
# shellcheck source=scripts/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

prepare dev,demo
cd "$root"
OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(threads 2)}
export OMP_NUM_THREADS
# Tests of these kinds share one cluster, one browser, or need the whole machine.
[[ $* =~ slurm|browser|soak ]] || set -- -n 2 --dist loadfile "$@"
exec "$venv/bin/python" -m pytest "$@"
