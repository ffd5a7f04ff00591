#!/usr/bin/env bash
# What tests/cluster needs of the system, from Debian's or Ubuntu's archive: Slurm with its daemons, munge, iproute2.
# As root; where everything is there it takes no time and no network.
set -euo pipefail

packages=(slurmctld slurmd slurm-client munge iproute2 procps)
if dpkg-query --show --showformat='${db:Status-Status}\n' "${packages[@]}" 2>/dev/null | grep -cx installed |
    grep -qx "${#packages[@]}"; then
    exit 0
fi
if ((EUID != 0)); then
    echo "tests/cluster will be left out: it needs root, and ${packages[*]}" >&2
    exit 0
fi
command -v apt-get >/dev/null || { echo "no apt-get: install ${packages[*]} by hand" >&2; exit 2; }
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
# Their services are not wanted: the tests start daemons of their own.
policy=/usr/sbin/policy-rc.d
if [[ ! -e $policy ]]; then
    trap 'rm -f "$policy"' EXIT
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod +x "$policy"
fi
apt-get install -qq --yes --no-install-recommends "${packages[@]}" >/dev/null
