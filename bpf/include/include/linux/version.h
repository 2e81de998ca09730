/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
#ifndef PODGATE_VERSION_H
#define PODGATE_VERSION_H

#define KERNEL_VERSION(a, b, c) (((a) << 16) + ((b) << 8) + (c))

/* bcc only chooses helper spellings by it; 5.10 is the oldest kernel that podgate runs on. */
#ifndef LINUX_VERSION_CODE
#define LINUX_VERSION_CODE KERNEL_VERSION(5, 10, 0)
#endif

#endif
