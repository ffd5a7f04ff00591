#!/usr/bin/env bash
# A run on several nodes, by the same call on each node, with torchrun's variables:
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 launch/torchrun_node.sh CONFIG [KEY=VALUE ...]
# The script starts Ray on this node (see ray_node.sh, whose variables also apply here). Node 0 also starts the run: the
# engines, and torchrun on every node with trainer ranks, with c10d rendezvous on the first of them.
#   MASTER_PORT   port of the Ray head (default 6379)
#   BAPO_RAY_LOG  file for the output of Ray on node 0 (default: stderr)
# After a signal on any node the run saves its state after the current step and ends; a second one ends it at once. The
# other nodes end with the run and with its exit code. If node 0 is lost, they end with exit code 1 a minute later
# (BAPO_HEAD_TIMEOUT_S). Node 0 ends when Ray on it ends.
set -euo pipefail
# shellcheck source=shared.sh
source "${BASH_SOURCE[0]%/*}/shared.sh"

[[ ${NNODES:-} =~ ^[1-9][0-9]*$ ]] || fail "NNODES=${NNODES:-} must be the number of nodes"
if [[ ! ${NODE_RANK:-} =~ ^(0|[1-9][0-9]*)$ ]] || ((NODE_RANK >= NNODES)); then
    fail "NODE_RANK=${NODE_RANK:-} must be this node's number, from 0 to $((NNODES - 1))"
fi
[[ -n ${MASTER_ADDR:-} ]] || fail "MASTER_ADDR must be the address of node 0"
check_token
head=$(getent ahostsv4 "$MASTER_ADDR" | awk '{print $1; exit}') || true
[[ -n $head ]] || fail "MASTER_ADDR=$MASTER_ADDR cannot be resolved to an IPv4 address; give that of node 0"
if [[ $head == 127.* ]]; then
    ((NNODES == 1)) || fail "MASTER_ADDR=$MASTER_ADDR is $head here, which other nodes cannot reach; give node 0's address"
    head=127.0.0.1
fi
export RAY_ADDRESS=$head:${MASTER_PORT:-6379}

# Ray's token is derived from the secret and the call, so that Ray refuses nodes of another run with this port and secret.
private=$(mktemp -d "${TMPDIR:-/tmp}/bapo-token-XXXXXX")
own_folder "$private"
printf '%s\n' "$(pwd -P)" "$NNODES" "$@" | cat "$RAY_AUTH_TOKEN_PATH" - | sha256sum |
    (umask 077; cut -c1-64 >"$private/token")
export RAY_AUTH_TOKEN_PATH=$private/token
# megatron_bapo/cluster/run_end.py writes the run's exit code to this file, and reads the wish to end it beside it.
export BAPO_RUN_END=$private/run-end

ray='' run=''
# shellcheck disable=SC2329  # called by the trap
end() {
    trap '' TERM INT HUP USR1
    if [[ -n $ray ]]; then kill -TERM "$ray" 2>/dev/null || true; fi
    wait || true
    rm -rf "$private"
}
trap end EXIT

# shellcheck disable=SC2329
ask_to_stop() { # Ray is needed here until the state is saved; before the run has started there is nothing to save
    [[ -e $private/watched && ! -e $private/stop ]] || exit 143
    echo "$script: asking the run to save its state and end; a second signal ends Ray on this node at once" >&2
    touch "$private/stop"
}

# Separate sessions: only this script receives the terminal's signals and forwards each once to the run; the run ends
# immediately on a second signal.
if ((NODE_RANK > 0)); then
    trap ask_to_stop TERM INT HUP USR1
    setsid "${BASH_SOURCE[0]%/*}/ray_node.sh" &
    ray=$!
    while kill -0 "$ray" 2>/dev/null && [[ ! -e $BAPO_RUN_END ]]; do sleep 0.5 & wait $! || true; done
    if [[ -e $BAPO_RUN_END ]]; then
        code=$(<"$BAPO_RUN_END")
        echo "$script: the run has ended with exit code $code; ending Ray on this node" >&2
    else
        wait "$ray" && code=0 || code=$?
    fi
    exit "$code"
fi
export BAPO_NODE_ADDRESS=$head
if [[ -n ${BAPO_RAY_LOG:-} ]]; then exec {ray_log}>>"$BAPO_RAY_LOG"; else exec {ray_log}>&2; fi
setsid "${BASH_SOURCE[0]%/*}/ray_node.sh" >&"$ray_log" 2>&1 {ray_log}>&- &
ray=$!
exec {ray_log}>&-
asked=''
# shellcheck disable=SC2329
ask_the_run() { asked=yes; [[ -z $run ]] || kill -TERM "$run" 2>/dev/null || true; }
trap ask_the_run TERM INT HUP USR1
setsid "$python" -m megatron_bapo train "$@" --num-nodes "$NNODES" &
run=$!
[[ -z $asked ]] || ask_the_run # the signal came before this script knew the run
while kill -0 "$run" 2>/dev/null; do
    sleep 0.5 & wait $! || true
    if ! kill -0 "$ray" 2>/dev/null && kill -0 "$run" 2>/dev/null; then # the run would wait for Ray, or join another one's
        wait "$ray" && code=1 || code=$?
        echo "$script: Ray on this node has ended before the run; see its output" >&2
        kill -KILL "$run"
        exit "$code"
    fi
done
wait "$run" && status=0 || status=$?
exit "$status"
