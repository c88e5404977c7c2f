// What one position of the canvas looks like: pure, so that the canvas can tell what changed without asking the page.

export const LEVELS = 10; // steps of confidence; fewer distinct looks, fewer repaints
const LIVE_WIDTH = 4; // characters of a mask while its token is not known yet
const SPECIAL = "\u25e6"; // begin and end tokens have no text of their own

/** A token inside a mask: what cannot be seen by itself gets a sign. */
const inside = (text) => text.trim() || (text.includes("\n") ? "\u21b5" : text ? "\u2423" : SPECIAL);

export const level = (probability) => Math.max(0, Math.min(LEVELS - 1, Math.floor(probability * LEVELS)));

const isWordlike = (text) => /[\p{L}\p{N}]/u.test(text);

/** Class that marks a rare token of the finished text: 1 (occurs once) to 5 (still rare), or "". */
export function rareClass(text, count, tau) {
  if (!(count >= 1 && count <= tau) || !isWordlike(text)) return "";
  return `rare r${Math.min(5, count)}`;
}

/** Space a mask takes. Once the text is known it takes its token's place, so that scrubbing moves nothing about. */
export function maskShape(final) {
  if (final === null || final === undefined) return { before: 1, width: LIVE_WIDTH, tail: "" };
  const at = final.indexOf("\n");
  const head = at < 0 ? final : final.slice(0, at);
  const before = head.length - head.trimStart().length;
  const width = Math.max(1, head.trim().length || 1);
  return { before: head.trim() ? before : 0, width, tail: at < 0 ? "" : final.slice(at) };
}

/** {kind, text, look, before, width, tail} of position i in a state of frames.js. */
export function cell(state, i, tape) {
  const text = state.texts[i];
  const final = tape.end ? tape.end.texts[i] : null;
  if (text === null) {
    const shape = maskShape(final);
    if (state.gone.has(i)) return { kind: "hole", text: inside(state.gone.get(i)), look: "gone", ...shape };
    const guess = state.guesses.get(i);
    if (!guess) return { kind: "hole", text: "", look: "", ...shape };
    return { kind: "hole", text: inside(guess[0]), look: `guess p${level(guess[1])}`, ...shape };
  }
  let look = tape.fixed.has(i) ? "given" : state.fresh.has(i) ? "new" : "";
  // A rare token is marked at every step at which it stands there already: one sees whether anchors come first.
  if (tape.end && !tape.fixed.has(i) && tape.end.tokens[i] === state.ids[i]) {
    look = `${look} ${rareClass(text, tape.end.counts?.[i], tape.end.tau)}`.trim();
  }
  if (text === "") return { kind: "token", text: SPECIAL, look: `${look} special`.trim(), before: 0, width: 0, tail: "" };
  return { kind: "token", text, look, before: 0, width: 0, tail: "" };
}

export const keyOf = (c) => `${c.kind}|${c.look}|${c.text}|${c.before}|${c.width}|${c.tail}`;
