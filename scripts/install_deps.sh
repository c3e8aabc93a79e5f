#!/usr/bin/env bash
# Installs the Debian/Ubuntu packages that building and testing need, and only those that are missing. Without root it prints the one
# line to run and stops with 1. Arguments name further groups: report (pictures), corpus (text to train on).
set -euo pipefail

packages=(g++ make nlohmann-json3-dev libcli11-dev libdnnl-dev libxxhash-dev libgtest-dev libboost-context-dev)
for group in "$@"; do
    case $group in
        report) packages+=(python3-matplotlib) ;;
        corpus) packages+=(python3) ;;
        *) echo "install_deps.sh: unknown group '$group', expected: report, corpus" >&2; exit 2 ;;
    esac
done

missing=()
for p in "${packages[@]}"; do
    dpkg-query -W -f '${db:Status-Status}' "$p" 2>/dev/null | grep -qx installed || missing+=("$p")
done
[ ${#missing[@]} -eq 0 ] && exit 0

sudo=
if [ "$(id -u)" -ne 0 ]; then
    if command -v sudo >/dev/null && sudo -n true 2>/dev/null; then
        sudo=sudo
    else
        echo "install_deps.sh: these packages are missing; as root run:  apt-get install -y ${missing[*]}" >&2
        exit 1
    fi
fi
echo "installing: ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
if ! $sudo apt-get install -y --no-install-recommends "${missing[@]}" >/tmp/bam_install_deps.log 2>&1; then
    $sudo apt-get update >>/tmp/bam_install_deps.log 2>&1 || true
    if ! $sudo apt-get install -y --no-install-recommends "${missing[@]}" >>/tmp/bam_install_deps.log 2>&1; then
        tail -n 5 /tmp/bam_install_deps.log >&2
        echo "install_deps.sh: apt-get could not install ${missing[*]} (log: /tmp/bam_install_deps.log)" >&2
        exit 1
    fi
fi
