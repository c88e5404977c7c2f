// What one position of the canvas looks like: pure, so that the canvas can tell what changed without asking the page.

export const LEVELS = 10; // steps of confidence; fewer distinct looks, fewer repaints
export const TIMES = 7; // colours of "what came first"
const SPECIAL = "\u25e6"; // begin and end tokens have no text of their own

export const level = (probability) => Math.max(0, Math.min(LEVELS - 1, Math.floor(probability * LEVELS)));

/** 0 (first) to TIMES - 1 (last). */
export const timeLevel = (step, steps) => Math.max(0, Math.min(TIMES - 1, Math.floor(((step - 1) / steps) * TIMES)));

/** The text of a token as it is set: lines are broken by the layout, not by the token. While the layout is not known a
 * line break is a sign. */
export function shownText(text, special, live) {
  if (special) return SPECIAL;
  return live ? text.replaceAll("\n", "\u21b5") : text.replaceAll("\n", "");
}

/**
 * {kind, text, look, room} of position i in a state of frames.js. `room` is the text whose place a mask takes: that of
 * the token that will stand there, where it is known, so that replaying moves nothing; null in a run that still goes on.
 * `times`: levels of timeLevel for "what came first", else null.
 */
export function cell(state, i, tape, times = null) {
  const text = state.texts[i], id = state.ids[i];
  const live = !tape.end;
  const last = live ? null : tape.end.tokens[i] ?? null;
  const room = last === null ? null : shownText(tape.end.texts[i], tape.special.has(last), false);
  if (id === null) {
    if (state.gone.has(i)) return { kind: "hole", text: state.gone.get(i).trim(), look: "gone", room };
    const guess = state.guesses.get(i);
    if (!guess || times) return { kind: "hole", text: "", look: "", room };
    return { kind: "hole", text: guess[0].trim(), look: `guess p${level(guess[1])}`, room };
  }
  const special = tape.special.has(id);
  // The first bytes of a character: there is nothing to read yet.
  if (text === "" && !special && live) return { kind: "hole", text: "", look: "part", room: null };
  const given = tape.fixed.has(i);
  const looks = [given ? "given" : "", special ? "special" : ""];
  if (times) looks.push(times[i] === null || special ? "" : `t${times[i]}`);
  else looks.push(!given && state.fresh.has(i) ? "new" : "");
  if (tape.marked.has(i) && last === id) looks.push("telling");
  return { kind: "token", text: shownText(text, special, live), look: looks.filter(Boolean).join(" "), room: null };
}

export const keyOf = (c) => `${c.kind}|${c.look}|${c.text}|${c.room}`;
