# shellcheck shell=bash disable=SC2034  # read by the scripts that source this one
# The interpreter of the launch scripts: BAPO_PYTHON, else the checkout's own environment, else what is on the PATH.
checkout=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${BAPO_PYTHON:-$checkout/.venv/bin/python}
[[ -x $python ]] || python=python3
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
