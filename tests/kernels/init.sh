#!/bin/busybox sh
# The guest's first process: the host's files, read-only, with memory laid over them; then guest.sh
# of the exchange folder takes over. $podgate_exchange comes from the kernel's command line.
set -e
export PATH=/bin
/bin/busybox --install -s /bin
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev
for module in /modules/*.ko; do
	insmod "$module"
done
# cache=loose: the files do not change, and each stat would be a round trip to the host.
options=trans=virtio,version=9p2000.L,msize=262144
mount -t 9p -o "ro,cache=loose,$options" host /host
mount -t tmpfs -o size=75% memory /memory
mkdir /memory/upper /memory/work
mount -t overlay -o lowerdir=/host,upperdir=/memory/upper,workdir=/memory/work overlay /root
mkdir -p /root/exchange
mount -t 9p -o "$options" exchange /root/exchange
umount /proc /sys /dev
exec switch_root /root /bin/bash /exchange/guest.sh
