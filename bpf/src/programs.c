/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * All programs in one translation unit, so that the compiler runs once.
 */
#include "abi.h"
#include "maps.h"
#include "packet.h"
#include "origin.h"
#include "frame.h"
#include "control.h"
#include "clock.h"
#include "events.h"
#include "drop_sources.h"
#include "replies.h"
#include "rules.h"
#include "sockets.h"
#include "verdict.h"
#include "new_flow.h"
#include "tcp.h"
#include "gate.c"
#include "host_devices.c"
#include "tunnels.c"
#include "hooks.c"
#include "relay.c"
