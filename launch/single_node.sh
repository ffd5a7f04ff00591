#!/usr/bin/env bash
# A run on this machine only: launch/single_node.sh CONFIG [KEY=VALUE ...]
# The program itself starts and ends Ray, engines and trainer. BAPO_PYTHON: the interpreter.
set -euo pipefail
# shellcheck source=shared.sh
source "${BASH_SOURCE[0]%/*}/shared.sh"
exec "$python" -m megatron_bapo train "$@"
