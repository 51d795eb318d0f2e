# shellcheck shell=bash
# Sourced by quickstart.sh, test.sh and wandb_sync.sh: messages and the Python environment.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${DTRAIN_VENV:-$root/.venv}
[[ $venv == /* ]] || venv=$PWD/$venv

say() { printf '%s\n' "$*" >&2; }
die() {
  say "error: $*"
  exit 1
}
has_nvidia_gpu() { compgen -G '/dev/nvidia[0-9]*' >/dev/null; }

# prepare NAME: installs dtrain from this checkout with an extra or a dependency group of pyproject.toml into the environment $venv.
# DTRAIN_VENV sets the folder of the environment. An existing environment, also of conda, is used; otherwise PYTHON makes one.
prepare() {
  local name=$1 stamp wanted pip what
  if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then make_venv; fi
  # dtrain is installed in editable mode, so it is only reinstalled if its dependencies may have changed.
  stamp=$venv/.dtrain-$name
  wanted="$root $("$venv/bin/python" -V) $(cat "$root/pyproject.toml" "$root/constraints.txt" | cksum)"
  if [[ -f $stamp && $(<"$stamp") == "$wanted" ]]; then return; fi
  say "installing dtrain and $name into $venv"
  if [[ $(uname) == Linux ]] && ! has_nvidia_gpu && ! "$venv/bin/python" -c 'import torch' 2>/dev/null; then
    say "(without an NVIDIA GPU, PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu before the command avoids the"
    say "download of the CUDA libraries, some gigabytes)"
  fi
  pip=("$venv/bin/python" -m pip install --disable-pip-version-check)
  if [[ ! -t 1 ]]; then pip+=(-q); fi
  what=(-e ".[$name]")
  if [[ $name == dev || $name == docs ]]; then # groups
    what=(-e . --group "$name")
    # Python 3.10 to 3.13 make environments with a pip that has no --group.
    "${pip[@]}" 'pip>=25.1' || die "pip could not be updated; its message is above."
  fi
  (cd "$root" && "${pip[@]}" -c constraints.txt "${what[@]}") || die "pip could not install $name; its message is above."
  printf '%s\n' "$wanted" >"$stamp"
}

make_venv() {
  local python=${PYTHON:-python3} version
  command -v "$python" >/dev/null ||
    die "$python is not on the path. Install Python 3.10 or newer, or set PYTHON=/path/to/python3"
  version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])') || die "$python does not start."
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    die "$python is Python $version; dtrain needs 3.10 or newer. Set another one: PYTHON=python3.11"
  "$python" -c 'import ensurepip, venv' 2>/dev/null ||
    die "$python cannot make virtual environments. On Debian and Ubuntu: apt-get install python$version-venv"
  if [[ -e $venv && ! -f $venv/pyvenv.cfg && -n $(ls -A "$venv" 2>/dev/null) ]]; then
    die "$venv is not empty and is not an environment with pip. Set another folder: DTRAIN_VENV=DIR"
  fi
  say "making a virtual environment in $venv ($python is Python $version)"
  # Without --clear, because it may be an environment of the user that only lacks pip.
  "$python" -m venv "$venv" || die "$python -m venv failed, see above. If $venv is a broken environment, delete it."
}

# threads PROCESSES: prints how many threads each process may use, so that all together use no more than the cores; at most
# four, because more do not make small models faster.
threads() {
  local cores each
  cores=$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)
  each=$((cores / $1))
  echo $((each < 1 ? 1 : each > 4 ? 4 : each))
}
