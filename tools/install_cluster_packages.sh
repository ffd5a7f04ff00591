#!/usr/bin/env bash
# Installs the system packages that tests need from Debian's or Ubuntu's archive: Slurm with its daemons, munge and iproute2
# for tests/cluster, Chromium for tests/unit/viewer, and bubblewrap for the sandbox of programs. It needs root, and no time or
# network if all are installed.
set -euo pipefail

packages=(slurmctld slurmd slurm-client munge iproute2 procps bubblewrap)
# Ubuntu's package is a stub of a snap, which does not run in containers.
grep -qx 'ID=debian' /etc/os-release && packages+=(chromium)
if dpkg-query --show --showformat='${db:Status-Status}\n' "${packages[@]}" 2>/dev/null | grep -cx installed |
    grep -qx "${#packages[@]}"; then
    exit 0
fi
if ((EUID != 0)); then
    echo "tests/cluster, tests/unit/viewer/test_*page.py and those of the sandbox will be skipped: they need root and the packages ${packages[*]}" >&2
    exit 0
fi
command -v apt-get >/dev/null || { echo "no apt-get: install ${packages[*]} by hand" >&2; exit 2; }
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
# Do not start the packages' services: the tests start their own daemons.
policy=/usr/sbin/policy-rc.d
if [[ ! -e $policy ]]; then
    trap 'rm -f "$policy"' EXIT
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod +x "$policy"
fi
apt-get install -qq --yes --no-install-recommends "${packages[@]}" >/dev/null
