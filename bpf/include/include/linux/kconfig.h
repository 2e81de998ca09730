/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * Stand-ins for the kernel headers that bcc needs.
 *
 * bcc compiles every program against the headers of the running kernel, which most nodes
 * lack. The gate touches only UAPI contexts (struct __sk_buff, struct bpf_sock), and bcc brings
 * those itself, so this tree holds just what bcc's own prologue needs to compile: the fixed-width
 * types, one config symbol and a version macro. BCC_KERNEL_SOURCE points at it.
 */
#ifndef PODGATE_KCONFIG_H
#define PODGATE_KCONFIG_H

/* bcc does not compile without it; whether the kernel has bpf(2) shows when it is called. */
#define CONFIG_BPF_SYSCALL 1

#endif
