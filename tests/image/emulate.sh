#!/bin/sh
# Runs a command below another root, where QEMU emulates the programs of its architecture:
# emulate.sh ROOT EMULATOR E_MACHINE COMMAND... in user, mount and PID namespaces of its own, so that
# the kernel starts the emulator in there only (Linux 6.7, 21ca59b365c0 "binfmt_misc: enable sandboxed
# mounts").
set -eu
root=$1 emulator=$2 machine=$3
shift 3
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
formats=$root/proc/sys/fs/binfmt_misc
mount -t binfmt_misc binfmt_misc "$formats"
# Programs and shared objects of 64 bits, little endian, of any ABI (elf(5)).
magic='\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00'"$machine"
mask='\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff'
# F: opened here, since it does not exist below the root.
printf '%s' ":podgate:M::$magic:$mask:$emulator:F" >"$formats/register"
exec chroot "$root" "$@"
