#!/usr/bin/env bash
# Runs Ray on this node in the foreground: as the head if RAY_ADDRESS is this node's address, else joined to the head.
#   RAY_ADDRESS          HOST:PORT of the head, a numeric address
#   RAY_AUTH_TOKEN_PATH  file with the cluster's secret, readable only by its owner, the same on every node
#   BAPO_NODE_ADDRESS    this node's address, or BAPO_INTERFACE, the network interface that has it; by default the address
#                        that reaches the head (in a Slurm job from BAPO_NODE_ADDRESSES, one line "node address" per node)
#   BAPO_ROLE            role of the node: trainer, rollout or any (default)
#   BAPO_FAILED_NODES    file that gets this node's name if Ray on it fails; none by default
#   BAPO_JOB_PORT        port of Ray's job server on the head's loopback interface, for `ray job submit`; none by default
#   BAPO_OBJECT_STORE_BYTES  shared memory of the node's object store (default 2 GB); what does not fit goes to disk
#   BAPO_HEAD_TIMEOUT_S  seconds without a reply from the head after which Ray on this node is ended (default 60)
# Start it in the same directory on every node, because relative paths of a run start there.
set -euo pipefail
# shellcheck source=shared.sh
source "${BASH_SOURCE[0]%/*}/shared.sh"

# shellcheck disable=SC2329  # called by the traps
note_failure() { # EXIT_CODE
    (($1 == 0)) || [[ -z ${BAPO_FAILED_NODES:-} ]] || echo "${SLURMD_NODENAME:-$(uname -n)}" >>"$BAPO_FAILED_NODES"
}
trap 'note_failure $?' EXIT

[[ ${RAY_ADDRESS:-} == ?*:* ]] || fail "RAY_ADDRESS=${RAY_ADDRESS:-} must be HOST:PORT of the head"
port=${RAY_ADDRESS##*:} head=${RAY_ADDRESS%:*}
[[ $head != *:* ]] || fail "RAY_ADDRESS=$RAY_ADDRESS has an IPv6 address; nodes need IPv4 addresses"
check_token
if [[ -n ${BAPO_NODE_ADDRESSES:-} ]]; then
    BAPO_NODE_ADDRESS=$(awk -v node="$SLURMD_NODENAME" '$1 == node {print $2}' <<<"$BAPO_NODE_ADDRESSES")
    [[ -n $BAPO_NODE_ADDRESS ]] || fail "BAPO_NODE_ADDRESSES has no address of node $SLURMD_NODENAME"
elif [[ -z ${BAPO_NODE_ADDRESS:-} && -n ${BAPO_INTERFACE:-} ]]; then
    BAPO_NODE_ADDRESS=$(ip -4 -o address show dev "$BAPO_INTERFACE" | awk '{sub("/.*", "", $4); print $4; exit}') || true
    [[ -n $BAPO_NODE_ADDRESS ]] || fail "BAPO_INTERFACE=$BAPO_INTERFACE has no IPv4 address; see ip -brief address"
elif [[ -z ${BAPO_NODE_ADDRESS:-} && $head != 127.* ]]; then # the head uses its own address
    BAPO_NODE_ADDRESS=$(ip -4 route get "$head" | sed -n 's/.* src \([^ ]*\).*/\1/p') || true
    [[ -n $BAPO_NODE_ADDRESS ]] || fail "no route to the head $head; set BAPO_NODE_ADDRESS to this node's address"
fi
address=${BAPO_NODE_ADDRESS:-127.0.0.1}
[[ $address != *:* ]] || fail "this node's address $address is an IPv6 address; nodes need IPv4 addresses"
if [[ $address == 127.* && $address != "$head" ]]; then
    fail "this node's address $address is a loopback address, which the head $head cannot reach; set BAPO_NODE_ADDRESS"
fi
role=${BAPO_ROLE:-any} limit_s=${BAPO_HEAD_TIMEOUT_S:-60}

# Servers accept connections from other nodes, all authenticated by the token. A node ends without waiting for others.
export RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=1
export RAY_USAGE_STATS_ENABLED=0 RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=0

# shellcheck disable=SC2016  # the inner shell expands its own arguments
head_is_reachable() { timeout 5 bash -c 'exec 3<>"/dev/tcp/$0/$1"' "$head" "$port" 2>/dev/null; }

wait_for_head() {
    local start=$SECONDS next_report=10
    until head_is_reachable; do
        ((SECONDS - start < 600)) || fail "no reply from the head $RAY_ADDRESS within 600 s"
        if ((SECONDS - start >= next_report)); then
            next_report=$((next_report + 30))
            echo "$script: node $address waits for the head $RAY_ADDRESS, $((SECONDS - start)) s so far" >&2
        fi
        sleep 1 & wait $!
    done
}

remove_abandoned() { # folders of this host's killed owners: a running owner holds the lock, which other hosts may not see
    local owner
    for owner in /dev/shm/megatron-bapo-*/OWNER.lock {"$parent","${TMPDIR:-/tmp}"}/bapo-{ray,token}-*/OWNER.lock; do
        [[ -O $owner ]] || continue
        [[ $owner == /dev/shm/* || $(<"$owner") == "$(uname -n)" ]] 2>/dev/null || continue
        flock --nonblock "$owner" rm -rf "${owner%/*}" 2>/dev/null || true # its owner may be faster
    done
}

ray='' folder=''
# shellcheck disable=SC2329  # called by the trap
end() {
    note_failure $?
    trap '' TERM INT HUP USR2
    if [[ -n $ray ]]; then
        kill -TERM "$ray" 2>/dev/null || true
        for _ in {1..30}; do kill -0 "$ray" 2>/dev/null || break; sleep 0.5; done
        pkill -KILL --session "$ray" || true
        wait "$ray" 2>/dev/null || true
        for _ in {1..20}; do pgrep --session "$ray" >/dev/null || break; sleep 0.1; done # they own the folders below
    fi
    rm -rf "$folder" || rm -rf "$folder" || true # an ending process may still be writing
    remove_abandoned
}
trap end EXIT
trap 'exit 143' TERM INT HUP
trap 'exit 0' USR2 # the job's request in slurm.sbatch

# Ray's folder for sockets, logs and spilled objects, private to this user and job and removed at the end. Ray's default,
# /tmp/ray, belongs to the first user of the node and stays. Ray opens its folder to everybody, so it lies in a private one.
# The paths of its sockets may have at most 107 characters.
parent=${RAY_TMPDIR:-${TMPDIR:-/tmp}}
[[ $parent == /* ]] && ((${#parent} <= 23)) || parent=/tmp
remove_abandoned
folder=$(mktemp -d "$parent/bapo-ray-XXXXXX")
own_folder "$folder"

options=(--node-ip-address="$address" --labels="megatron-bapo/role=$role" --disable-usage-stats --block)
options+=(--include-log-monitor=false --temp-dir="$folder/ray") # the monitor's copies of the logs are not used
options+=(--object-store-memory="${BAPO_OBJECT_STORE_BYTES:-2000000000}")
options+=(--dashboard-agent-listen-port=0) # by default the same port for every cluster of a node, of which one gets it
if [[ $address == "$head" ]]; then
    if head_is_reachable; then
        fail "port $port of $address is in use, by another run or another user; choose another one for the head" \
            "(MASTER_PORT for torchrun_node.sh, else RAY_ADDRESS; a Slurm job that is submitted again has another one)"
    fi
    options+=(--head --port="$port" --no-monitor)
    if [[ -n ${BAPO_JOB_PORT:-} ]]; then
        options+=(--include-dashboard=true --dashboard-host=127.0.0.1 --dashboard-port="$BAPO_JOB_PORT")
        # `ray job stop` requests a stop after the current step; by default it would kill the run 3 s later.
        export RAY_JOB_STOP_WAIT_TIME_S=${RAY_JOB_STOP_WAIT_TIME_S:-3600}
    else
        options+=(--include-dashboard=false)
    fi
else
    wait_for_head
    options+=(--address="$RAY_ADDRESS")
fi
unset RAY_ADDRESS # the head is not started yet
# In its own session, so that all its processes can be ended.
setsid "$python" -m megatron_bapo.cluster.ray_start start "${options[@]}" &
ray=$!

last=$SECONDS
while kill -0 "$ray" 2>/dev/null; do
    sleep 2 & wait $!
    if [[ $address == "$head" ]] || head_is_reachable; then
        last=$SECONDS
    elif ((SECONDS - last > limit_s)); then
        echo "ray_node.sh: node $address has had no reply from the head $head:$port for $limit_s s: the head has ended," \
            "or the network is down. Ending Ray on this node." >&2
        exit 1
    fi
done
wait "$ray" && code=0 || code=$?
if ((code > 0)) && [[ $address != "$head" ]]; then
    echo "$script: Ray has ended on node $address. If its output names InvalidAuthToken, then the head $head:$port belongs to" \
        "another run, or the secret, the directory or the arguments of this node differ from those of node 0." >&2
fi
exit "$code"
