/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * All programs as one text, so that one short run of the compiler serves them all.
 */
#include "abi.h"
#include "maps.h"
#include "packet.h"
#include "frame.h"
#include "control.h"
#include "clock.h"
#include "events.h"
#include "callers.h"
#include "replies.h"
#include "rules.h"
#include "sockets.h"
#include "gate.c"
#include "bridges.c"
#include "tunnels.c"
#include "hooks.c"
#include "relay.c"
