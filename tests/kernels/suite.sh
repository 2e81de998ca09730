#!/bin/bash
# Runs the suite in the guest. All that it finds out lies in /exchange when the machine goes off.
. /exchange/settings
export HOME=/root LANG=C.UTF-8 PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
cd "$checkout" || exit 1

# All takes ten times as long here: time limits that are right anywhere else are too short. Python
# 3.11 may crash when it prints the stacks of threads that run, so that is done after a test's limit.
export PODGATE_TEST_PATIENCE=6
export PODGATE_PROGRAMS=$checkout/compiled
ulimit -Hn 524288 # as systemd gives every service
uname -r >/exchange/release
cat /proc/1/comm >/exchange/init
.venv/bin/python -m pytest -m kernel -p no:cacheprovider -n 2 \
	--no-loadscope-reorder -p tests.kernels.recorder -o faulthandler_timeout=4000 \
	-o faulthandler_exit_on_timeout=false "${arguments[@]}" >/exchange/output.txt 2>&1
echo $? >/exchange/status
dmesg >/exchange/dmesg.txt
sync
echo o >/proc/sysrq-trigger
sleep 60
