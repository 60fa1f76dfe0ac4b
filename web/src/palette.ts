// One colour per kind of work, as in the terminal and in pictures; the page's data brings them.

export const COLORS = { forward: "", backward: "", optimizer: "", communication: "", exposed: "" };
