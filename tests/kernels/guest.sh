#!/bin/bash
# Runs as the guest's init, over the host's files: what a node has mounted, then the suite. All that
# it finds out lies in /exchange when the machine goes off.
. /exchange/settings
export HOME=/root LANG=C.UTF-8 PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin

mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev
mkdir -p /dev/pts /dev/shm
mount -t devpts devpts /dev/pts
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mount -t bpf bpf /sys/fs/bpf
for folder in /dev/shm /run; do
	mount -t tmpfs tmpfs "$folder"
done
ln -s /proc/self/fd /dev/fd
mkdir -p "/lib/modules/$release"
mount --bind "$modules" "/lib/modules/$release"
ip link set lo up
modprobe tun # its device node is made when it is loaded

# The sources as of the start of the run, at the path where the virtual environment expects them:
# they may be edited meanwhile.
mkdir -p /run/checkout/.venv
tar -C /run/checkout -xf /exchange/checkout.tar
mount --bind "$checkout/.venv" /run/checkout/.venv
mount -t tmpfs tmpfs /tmp
mkdir -p "$checkout" # gone if it was below /tmp
mount --rbind /run/checkout "$checkout"
cd "$checkout" || exit 1

# All takes ten times as long here: time limits that are right anywhere else are too short.
export PODGATE_TEST_PATIENCE=6
export PODGATE_PROGRAMS=$checkout/compiled
uname -r >/exchange/release
# Responses of a container runtime are the same on every kernel.
.venv/bin/python -m pytest -m kernel --ignore tests/runtime -p no:cacheprovider \
	-p tests.kernels.recorder -o faulthandler_timeout=300 -o faulthandler_exit_on_timeout=false "${arguments[@]}" >/exchange/output.txt 2>&1
echo $? >/exchange/status
dmesg >/exchange/dmesg.txt
sync
echo o >/proc/sysrq-trigger
sleep 60
