#!/usr/bin/env bash
# Install the Transformer Engine of a lock file into an environment that has the lock's torch.
#
#   tools/install_transformer_engine.sh PYTHON LOCK
#
# PYTHON is the environment's Python, as a path or as the name of a program, such as python3.12.
# PyPI has its torch extension only as source. It is compiled once per versions of Python, torch and Transformer Engine
# and kept in WHEEL_CACHE. If that fails, nothing of Transformer Engine is installed, because a part of it would break
# the import of Megatron-Core, and model.transformer_impl=local still works; with TRANSFORMER_ENGINE=required it is an
# error.
set -euo pipefail

python=$(command -v "$1") || { echo "error: there is no program $1; give the environment's Python" >&2; exit 2; }
lock=$2
extension=$(grep '^transformer-engine-torch==' "$lock")
torch=$("$python" -c 'import importlib.metadata as m, sys; print(f"cp{sys.version_info[0]}{sys.version_info[1]}-torch-" + m.version("torch"))')
cache=${WHEEL_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/megatron-bapo/wheels}/$torch
wheel=("$cache"/transformer_engine_torch-"${extension#*==}"-*.whl)

build() {
    local log=$cache/build.log start=$SECONDS environment packages step minutes=1
    environment=$(cd "$(dirname "$python")" && pwd)
    packages=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/nvidia
    echo "compiling $extension for $torch: about 10 minutes on 2 idle cores, once; log: $log"
    # Headers come from the lock's NVIDIA packages, so no CUDA toolkit is needed. The extension is C++ only. Without the
    # environment's ninja on the path torch compiles one file after the other. pip's own cache of wheels would return one
    # that was compiled for another torch.
    PATH=$environment:$PATH CPATH=$packages/cu13/include:$packages/cudnn/include:$packages/nccl/include${CPATH:+:$CPATH} \
    NVTE_BUILD_USE_NVIDIA_WHEELS=1 NVTE_WITH_NCCL_EP=0 NVTE_PYTORCH_FORCE_BUILD=TRUE \
    NVTE_CUDA_ARCHS=${NVTE_CUDA_ARCHS:-80;90;100} MAX_JOBS=${MAX_JOBS:-$(nproc)} \
        "$python" -m pip wheel --verbose --disable-pip-version-check --no-cache-dir --no-deps --no-build-isolation \
        --wheel-dir "$cache" "$extension" >"$log" 2>&1 &
    local building=$!
    while kill -0 "$building" 2>/dev/null; do
        sleep 1
        ((SECONDS - start < 60 * minutes)) && continue
        step=$(sed -nE 's/^ *(\[[0-9]+\/[0-9]+\]).*/\1/p' "$log" | tail -n 1)
        echo "  $minutes min: ${step:-preparing the build}"
        minutes=$((minutes + 1))
    done
    wait "$building"
}

check_compiler() { # before ten minutes of compiling
    local compiler=${CXX:-c++} include
    include=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["include"])')
    if ! command -v "${compiler%% *}" >/dev/null; then # CXX may have arguments
        echo "error: there is no C++ compiler $compiler; install g++, or set CXX"
    elif [[ ! -e $include/Python.h ]]; then
        echo "error: there is no $include/Python.h; install Python's headers (python3-dev or python3-devel)"
    else
        return 0
    fi >"$cache/build.log"
    return 1
}

if [[ ! -e ${wheel[0]} ]]; then
    mkdir -p "$cache"
    if ! check_compiler || ! build; then
        grep -m 2 'error: ' "$cache/build.log" >&2 || tail -n 5 "$cache/build.log" >&2
        echo "warning: $extension could not be compiled, so Transformer Engine is not installed; configurations with" \
            "model.transformer_impl=local work. To try again: $0 $python $lock" >&2
        [[ ${TRANSFORMER_ENGINE:-} != required ]]
        exit
    fi
    wheel=("$cache"/transformer_engine_torch-"${extension#*==}"-*.whl)
fi
mapfile -t others < <(grep -E '^transformer-engine(-cu[0-9]+)?==' "$lock")
"$python" -m pip install --quiet --quiet --disable-pip-version-check --no-deps "${wheel[0]}" "${others[@]}"
