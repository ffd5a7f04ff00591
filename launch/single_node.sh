#!/usr/bin/env bash
# A run on this machine alone: launch/single_node.sh CONFIG [KEY=VALUE ...]
# Ray, engines and trainer are started, and ended, by the program itself. BAPO_PYTHON: the interpreter.
set -euo pipefail
# shellcheck source=python.sh
source "${BASH_SOURCE[0]%/*}/python.sh"
exec "$python" -m megatron_bapo train "$@"
