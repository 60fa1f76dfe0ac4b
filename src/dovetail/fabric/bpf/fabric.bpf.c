/* SPDX-License-Identifier: MIT OR GPL-2.0 */
/* The switch. See docs/fabric.md for the whole story; each header here tells one part of it. */
#include "programs.h"

char _license[] SEC("license") = "Dual MIT/GPL";
