#!/bin/bash
# Runs as the guest's init, over the host's files: what a node has mounted, then the suite, with
# systemd as the next init if $systemd is set.
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
# Of tests/kernel/devices, with the modules that they need: what is missing fails there.
tar -C / --keep-directory-symlink -xf /exchange/packages.tar
for module in $devices; do
	modprobe "$module"
done
modprobe tun # its device node is made when it is loaded

tar -C / --keep-directory-symlink -xf /exchange/python.tar
# The sources as of the start of the run, at the path where the virtual environment expects them:
# they may be edited meanwhile.
mkdir -p /run/checkout/.venv
tar -C /run/checkout -xf /exchange/checkout.tar
mount --bind "$checkout/.venv" /run/checkout/.venv
mount -t tmpfs tmpfs /tmp
mkdir -p "$checkout" # gone if it was below /tmp
mount --rbind /run/checkout "$checkout"
cd "$checkout" || exit 1

if [ -z "$systemd" ]; then
	exec /bin/bash /exchange/suite.sh
fi
# Units of the host's files are of no use here: the suite's is the only one that is started.
mkdir -p /run/systemd/system
cat >/run/systemd/system/podgate-suite.service <<-EOF
	[Unit]
	DefaultDependencies=no
	[Service]
	ExecStart=/bin/bash /exchange/suite.sh
	TimeoutStartSec=infinity
EOF
exec /lib/systemd/systemd --unit=podgate-suite.service --log-target=console --show-status=no
