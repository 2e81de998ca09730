#!/bin/sh
# setup.sh [run|page]: installs what podgate's make targets need on Debian 12 or 13: distribution
# packages, then a virtual environment in .venv. With `run` only what the agent and the demo need,
# without the tools of tests; with `page` also Chromium. Quick when there is nothing to do. make runs
# it; safe to run manually.
set -eu
cd "$(dirname "$0")/.."
what="${1:-all}"

log() {
	echo "podgate setup: $*" >&2
}

# bcc comes from the distribution: PyPI's package of that name is another project. Its Python module
# is built for the distribution's Python, so that Python creates the virtual environment.
packages="python3-bpfcc python3-venv iproute2 util-linux nftables"
extras="[demo]"

if [ "$what" != run ]; then
	extras="[dev]"
	# gcc and the C library's headers are for podgate-cni, bpftool is what maps are compared with, curl
	# is what README's commands use, iptables is a backend of `podgate proxy`, skopeo pushes images, and the
	# rest is for tests with a container runtime.
	packages="$packages gcc libc6-dev bpftool curl iptables skopeo containernetworking-plugins busybox-static"
	# Docker's packages include containerd and runc, too, and Debian's would replace them.
	if ! command -v containerd >/dev/null || ! command -v runc >/dev/null; then
		packages="$packages containerd runc"
	fi
fi

if [ "$what" = page ]; then
	packages="$packages chromium"
fi

missing=""
for package in $packages; do
	if ! dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q ' installed$'; then
		missing="$missing $package"
	fi
done
if [ -n "$missing" ]; then
	if ! command -v apt-get >/dev/null; then
		log "this is not Debian; install the equivalents of:$missing"
		exit 1
	fi
	if [ "$(id -u)" -ne 0 ]; then
		log "root is needed to install:$missing; run 'sudo apt-get install$missing' and try again"
		exit 1
	fi
	log "installing$missing"
	export DEBIAN_FRONTEND=noninteractive
	# The package lists may be missing or old: fetch them only if the installation fails.
	# shellcheck disable=SC2086
	apt-get install -y -qq --no-install-recommends $missing >/dev/null 2>&1 || {
		apt-get update -qq
		apt-get install -y -qq --no-install-recommends $missing >/dev/null
	}
fi

if [ ! -x .venv/bin/python ]; then
	log "creating a virtual environment in .venv"
	/usr/bin/python3 -m venv .venv
fi
# The machine's other Python packages, and what they run at each start of Python, take no part. An
# environment of a previous version has them.
sed -i 's/^include-system-site-packages = true/include-system-site-packages = false/' .venv/pyvenv.cfg
ln -sfn "$(/usr/bin/python3 -c 'import bcc; print(*bcc.__path__)')" \
	"$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/bcc"
log "installing Python packages (the first time: some 10 s)"
# Python compiles the modules that it imports. To compile all others takes as long as the rest of the
# installation.
by_pip() {
	.venv/bin/python -m pip install -q --disable-pip-version-check --root-user-action ignore --no-compile \
		-c deploy/constraints.txt "$@"
}
# uv installs in a fifth of pip's time. It does not read pip's settings: where a machine has an index or a
# proxy of its own in these, pip does it.
install_packages() {
	.venv/bin/uv pip install -q --python .venv/bin/python -c deploy/constraints.txt "$@" 2>/dev/null || by_pip "$@"
}
[ -x .venv/bin/uv ] || by_pip uv || log "uv cannot be installed; pip takes half a minute longer"
# What builds podgate, and packages without a wheel, once. Otherwise it is fetched and installed apart,
# twice for each installation. Debian 13's virtual environments have no setuptools.
.venv/bin/python -c 'import editables, hatchling, setuptools' 2>/dev/null ||
	install_packages editables hatchling setuptools
install_packages --no-build-isolation -e ".$extras"

# promtool tests metrics and alerts, Prometheus draws dashboards, and images are pushed to a registry.
# Debian's packages start servers, so they are not installed.
programs=""
want() {
	[ -x ".venv/bin/$1" ] || programs="$programs $1"
}
[ "$what" = run ] || { want promtool && want docker-registry; }
[ "$what" != page ] || want prometheus
if [ -n "$programs" ]; then
	log "fetching from Debian's packages:$programs"
	fetched="$(mktemp -d)"
	trap 'rm -rf "$fetched"' EXIT
	fetch() {
		(cd "$fetched" && apt-get download -qq "$1" >/dev/null 2>&1)
	}
	# promtool has a package of its own since Debian 13.
	fetch_program() {
		fetch "$1" || { [ "$1" = promtool ] && fetch prometheus; }
	}
	for program in $programs; do
		fetch_program "$program" || { apt-get update -qq && fetch_program "$program"; } || {
			log "cannot fetch $program; put it into .venv/bin"
			exit 1
		}
		for package in "$fetched"/*.deb; do
			dpkg-deb -x "$package" "$fetched/package"
		done
		install -m 755 "$fetched/package/usr/bin/$program" ".venv/bin/$program"
	done
fi
touch .venv/.run
if [ "$what" != run ]; then
	touch .venv/.complete
fi
if [ "$what" = page ]; then
	touch .venv/.page
fi
