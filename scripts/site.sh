#!/usr/bin/env bash
# Builds the site from docs/ and the docstrings into build/site, without warnings:
#
#   bash scripts/site.sh [serve]
#
# `serve` shows it on http://127.0.0.1:8000 instead, and builds again when a page changes. PYTHON and DTRAIN_VENV are as in
# quickstart.sh.
set -euo pipefail
# shellcheck source=scripts/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

command=${1:-build}
[[ $command == build || $command == serve ]] || die "$command: want build (the default) or serve."
prepare docs
cd "$root"
export OMP_NUM_THREADS=1 # the models are tiny
"$venv/bin/python" scripts/site_pages.py
# The theme announces its successor, in red, at each start.
NO_MKDOCS_2_WARNING=1 exec "$venv/bin/python" -m mkdocs "$command"
