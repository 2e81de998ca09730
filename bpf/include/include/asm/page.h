/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/* Empty on purpose: bcc's prologue includes it and uses nothing of it (see linux/kconfig.h). */
