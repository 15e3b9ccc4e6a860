#!/usr/bin/env bash
# Installs what the tests need from Debian. Run as root: `make ci-packages`.
#
# A package stands here with its reason and the check that it is missing.
set -euo pipefail

packages=()

# `make venv`: where python3 is Debian's own, its venv module is a package apart.
"${PYTHON:-python3}" -c 'import ensurepip, venv' 2>/dev/null || packages+=(python3-venv)

# pip speaks TLS to its index with the system's certificates.
[ -e /etc/ssl/certs/ca-certificates.crt ] || packages+=(ca-certificates)

# End-to-end tests look for the processes that `pagemill serve` started.
command -v ps >/dev/null || packages+=(procps)

# The CPU's kernels are compiled where they run; their tests want no stand-in.
command -v g++ >/dev/null || packages+=(g++)

if [ "${#packages[@]}" -eq 0 ]; then
  echo "ci-packages: nothing is missing"
  exit 0
fi
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${packages[@]}"
