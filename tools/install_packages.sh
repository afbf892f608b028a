#!/usr/bin/env bash
# Install the Debian packages without which tests skip: promtool and Prometheus, GoogleTest, clang's checks,
# what a real node and images are made with, and a library of Mooncake's; and ccache, which spares a second
# build of the same sources. Nothing happens where all are there.
set -euo pipefail
# A program or file that says that the package is there.
declare -A proof=(
  [prometheus]=promtool [libgtest-dev]=/usr/include/gtest/gtest.h [clang]=clang++ [clang-tidy]=clang-tidy
  [runc]=runc [iptables]=iptables [iproute2]=ip [containernetworking-plugins]=/usr/lib/cni/ptp
  [buildah]=buildah [mmdebstrap]=mmdebstrap [ccache]=ccache [libibverbs1]=/usr/lib/x86_64-linux-gnu/libibverbs.so.1
)
missing=()
for package in "${!proof[@]}"; do
  command -v "${proof[$package]}" >/dev/null || [ -e "${proof[$package]}" ] || missing+=("$package")
done
[ "${#missing[@]}" -gt 0 ] || exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
  echo "some tests will skip and builds take longer without ${missing[*]}: install these Debian packages, or yours" >&2
  exit 0
fi
echo "installing ${missing[*]}"
# No service is started: the tests start what they need, on ports of their own.
export DEBIAN_FRONTEND=noninteractive RUNLEVEL=1
if ! { apt-get update -qq && apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null; }; then
  echo "they could not be installed: the tests that need them skip and say so" >&2
fi
