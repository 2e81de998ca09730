#!/bin/sh
# Builds podgate-cni, static and small: build.sh OUTPUT [compiler's further arguments]. It shares
# bpf/src/abi.h with the eBPF programs, and the schema with bpf/abi.py.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
output=$1
shift
schema=$(cd "$here/../.." && python3 -c 'from bpf import abi; print(abi.SCHEMA)')
if [ $# -eq 0 ]; then
	set -- -static -Os -s
fi
# Renamed into place: it may be running.
"${CC:-gcc}" -std=gnu11 -Wall -Wextra -Werror -D_GNU_SOURCE "-DPODGATE_SCHEMA=$schema" "$@" \
	-o "$output.new" "$here"/*.c
mv "$output.new" "$output"
