#!/usr/bin/env bash
# Installs the packages that the tests need, and runs the tests:
#
#   bash scripts/test.sh [pytest arguments]
#
# Without arguments it runs the default tests, a few minutes on two cores; `-m slow` runs the slow ones. Four test files run
# at a time, because tests wait for processes that they start; `-n 0` runs one file after the other and does not delay output.
# Paths are relative to the checkout. PYTHON and DTRAIN_VENV are as in quickstart.sh; both use the same environment.
set -euo pipefail
# shellcheck source=scripts/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

prepare dev
cd "$root"
OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(threads 2)}
export OMP_NUM_THREADS
# Each process that a test starts would compile the package again.
unset PYTHONDONTWRITEBYTECODE
# Tests of these kinds share one cluster or one browser, or need the whole machine.
[[ $* =~ slurm|browser|soak ]] || set -- -n 4 --dist loadfile "$@"
exec "$venv/bin/python" -m pytest "$@"
