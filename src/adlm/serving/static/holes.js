// Holes in a typed text: those the server reads, and those that were meant but written otherwise.

export const HOLE = /\[MASK(?::(\d+))?\]/;
// Whatever begins like a hole: another case, no number, spaces, no end.
const NEARLY = /\[\s*mask\b\s*:?\s*(\d*)\s*\]?/gi;

/** [{written, meant}] of what looks like a hole and is none. */
export function nearHoles(text) {
  return [...text.matchAll(NEARLY)]
    .filter(([written]) => !/^\[MASK(:[1-9]\d*)?\]$/.test(written))
    .map(([written, number]) => ({ written: written.trimEnd(), meant: Number(number) > 1 ? `[MASK:${Number(number)}]` : "[MASK]" }));
}

/** The text with those written as they were meant. */
export function mended(text) {
  return nearHoles(text).reduce((whole, { written, meant }) => whole.replace(written, meant), text);
}
