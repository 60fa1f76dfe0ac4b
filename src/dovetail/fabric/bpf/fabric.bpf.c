/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/* The switch. See docs/fabric.md for the whole story; each header here tells one part of it. */
#include "programs.h"

char _license[] SEC("license") = "GPL v2";
