# shellcheck shell=bash disable=SC2034  # read by the scripts that source this one
# Interpreter of the launch scripts (BAPO_PYTHON, else that of the checkout's environment, else python3 on the PATH), and
# functions that several of them use.
script=${0##*/}

fail() { echo "$script on $(uname -n): $*" >&2; exit 2; }

check_token() { # the cluster's secret; a link to it, as in Kubernetes, has no permissions of its own
    unset RAY_AUTH_TOKEN # of the shell; Ray would prefer it
    if [[ -z ${RAY_AUTH_TOKEN_PATH:-} || ! -s $RAY_AUTH_TOKEN_PATH ]]; then
        fail "RAY_AUTH_TOKEN_PATH must name a file with the cluster's secret: (umask 077; openssl rand -hex 32 > FILE)"
    fi
    if [[ ! $(stat -Lc %a "$RAY_AUTH_TOKEN_PATH") =~ ^[46]00$ ]]; then
        fail "$RAY_AUTH_TOKEN_PATH is readable by others: chmod 600 it"
    fi
}

own_folder() { # FOLDER: hold its lock as long as this script or what it starts runs; others remove it when nobody does
    local lock folder_lock
    exec {folder_lock}<"$1" # systemd-tmpfiles removes what is old except in a folder that is locked itself
    flock --shared "$folder_lock" || true # not every file system can lock folders
    exec {lock}>"$1/.locking"
    flock "$lock"
    uname -n >&"$lock" # on some file systems locks count on one host only
    mv "$1/.locking" "$1/OWNER.lock" # locked before others can see it
}

checkout=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${BAPO_PYTHON:-$checkout/.venv/bin/python}
if ! command -v "$python" >/dev/null; then
    [[ -z ${BAPO_PYTHON:-} ]] || fail "BAPO_PYTHON=$BAPO_PYTHON is not an executable file"
    python=python3
fi

# A trainer rank has a gloo connection to every other rank of each of its groups, about 3,000 in all of 512 ranks. Slurm
# passes on the limit of the shell that submits, usually 1,024.
most_files=$(ulimit -Hn)
[[ $most_files != unlimited ]] && ((most_files < 65536)) || most_files=65536
[[ $(ulimit -Sn) == unlimited ]] || (($(ulimit -Sn) >= most_files)) || ulimit -Sn "$most_files"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
