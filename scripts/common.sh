# shellcheck shell=bash
# What quickstart.sh and test.sh share: the environment that they run in. Sourced, never run.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${DTRAIN_VENV:-$root/.venv}
[[ $venv == /* ]] || venv=$PWD/$venv

say() { printf '%s\n' "$*" >&2; }
die() {
  say "error: $*"
  exit 1
}
has_nvidia_gpu() { compgen -G '/dev/nvidia[0-9]*' >/dev/null; }

# prepare EXTRAS: an environment in $venv that holds dtrain from this checkout with these extras.
# PYTHON names the interpreter that makes it, DTRAIN_VENV its place; one that is there, conda's too, is used as it is.
prepare() {
  local extras=$1 stamp wanted quiet=-q
  if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then make_venv; fi
  # dtrain is installed in place, so only what decides its dependencies can make an installation stale.
  stamp=$venv/.dtrain-$extras
  wanted="$root $("$venv/bin/python" -V) $(cat "$root/pyproject.toml" "$root/constraints.txt" | cksum)"
  if [[ -f $stamp && $(<"$stamp") == "$wanted" ]]; then return; fi
  say "installing dtrain[$extras] into $venv"
  if [[ $(uname) == Linux ]] && ! has_nvidia_gpu && ! "$venv/bin/python" -c 'import torch' 2>/dev/null; then
    say "(no NVIDIA GPU here: PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu in front of the command spares"
    say "the gigabytes of CUDA's libraries)"
  fi
  if [[ -t 1 ]]; then quiet=; fi
  (cd "$root" && "$venv/bin/python" -m pip install --disable-pip-version-check $quiet -c constraints.txt -e ".[$extras]") ||
    die "pip could not install dtrain[$extras]; what it says is above."
  printf '%s\n' "$wanted" >"$stamp"
}

make_venv() {
  local python=${PYTHON:-python3} version
  command -v "$python" >/dev/null ||
    die "no $python on the path. Install Python 3.10 or newer, or name one: PYTHON=/path/to/python3"
  version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])') || die "$python does not start."
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    die "$python is Python $version; dtrain needs 3.10 or newer. Name one: PYTHON=python3.11"
  "$python" -c 'import ensurepip, venv' 2>/dev/null ||
    die "$python cannot make virtual environments. On Debian and Ubuntu: apt-get install python$version-venv"
  if [[ -e $venv && ! -f $venv/pyvenv.cfg && -n $(ls -A "$venv" 2>/dev/null) ]]; then
    die "$venv is not empty and no environment with pip. Choose another place: DTRAIN_VENV=DIR"
  fi
  say "making a virtual environment in $venv ($python is Python $version)"
  # Without --clear: it may be somebody's own environment that merely lacks pip.
  "$python" -m venv "$venv" || die "$python -m venv failed, see above. If $venv is a broken one, delete it and try again."
}

# threads PROCESSES: how many threads each may use, so that together they ask for no more than there are; at most four,
# since more do not help models of a size that a person tries out.
threads() {
  local cores each
  cores=$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)
  each=$((cores / $1))
  echo $((each < 1 ? 1 : each > 4 ? 4 : each))
}
