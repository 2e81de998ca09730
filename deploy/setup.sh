#!/bin/sh
# Everything that podgate's make targets need, on Debian 12 or 13: distribution packages, then a
# virtual environment in .venv. Quick when there is nothing to do. Run by make; safe to run by hand.
set -eu
cd "$(dirname "$0")/.."

say() {
	echo "podgate setup: $*" >&2
}

# bcc is the distribution's: PyPI's package of that name is another project. Its Python module is
# built for the distribution's Python, so that one makes the virtual environment.
# gcc and the C library's headers are for podgate-cni.
packages="python3-bpfcc python3-venv iproute2 util-linux nftables gcc libc6-dev"

# For the tests of pods in a container runtime. Docker's packages bring containerd and runc, too,
# and Debian's would take their place.
packages="$packages containernetworking-plugins busybox-static"
if ! command -v containerd >/dev/null || ! command -v runc >/dev/null; then
	packages="$packages containerd runc"
fi

missing=""
for package in $packages; do
	if ! dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q ' installed$'; then
		missing="$missing $package"
	fi
done
if [ -n "$missing" ]; then
	if ! command -v apt-get >/dev/null; then
		say "this is no Debian; install the equivalents of:$missing"
		exit 1
	fi
	if [ "$(id -u)" -ne 0 ]; then
		say "root is needed to install:$missing; run 'sudo apt-get install$missing' and try again"
		exit 1
	fi
	say "installing$missing"
	export DEBIAN_FRONTEND=noninteractive
	# The package lists may be missing or old: fetch them only if it does not work without.
	# shellcheck disable=SC2086
	apt-get install -y -qq --no-install-recommends $missing >/dev/null 2>&1 || {
		apt-get update -qq
		apt-get install -y -qq --no-install-recommends $missing >/dev/null
	}
fi

if [ ! -x .venv/bin/python ]; then
	say "making a virtual environment in .venv"
	/usr/bin/python3 -m venv --system-site-packages .venv
fi
say "installing Python packages"
.venv/bin/python -m pip install -q --disable-pip-version-check --root-user-action ignore \
	-c deploy/constraints.txt -e '.[dev]'
touch .venv/.complete
