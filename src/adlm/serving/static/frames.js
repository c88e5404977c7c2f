// The recording of one run ("tape"): the first canvas, what changed at each step, and a whole canvas now and then, so
// that any step is rebuilt from at most KEYFRAME_EVERY changes and 500 steps of 1,024 tokens stay small.
import { itemsOf } from "./template.js";

export const KEYFRAME_EVERY = 32;

/** A tape that holds only the canvas before the first step (index 0). Index k is the canvas after k frames. */
export function makeTape(start) {
  const first = { ids: [...start.tokens], texts: [...start.texts] };
  return {
    start,
    length: start.tokens.length,
    fixed: new Set(start.fixed),
    special: new Set(start.special),
    frames: [],
    keyframes: [first],
    tip: copy(first),
    lastGuess: [-1],
    marked: new Set(),
    end: null,
  };
}

const copy = (canvas) => ({ ids: [...canvas.ids], texts: [...canvas.texts] });

function apply(canvas, frame) {
  for (const position of frame.unset) canvas.ids[position] = canvas.texts[position] = null;
  for (const [position, id, text] of frame.set) {
    canvas.ids[position] = id;
    canvas.texts[position] = text;
  }
}

/** Add a frame; the tape is changed in place because it grows hundreds of times. A frame brings what the anchor network
 * guessed in the pass that drew it, so its guesses are about the canvas before it. */
export function append(tape, frame) {
  const whole = { set: [], unset: [], anchors: [], ...frame };
  apply(tape.tip, whole);
  const before = tape.frames.push(whole) - 1;
  if (whole.anchors.length) tape.lastGuess[before] = before;
  tape.lastGuess.push(tape.lastGuess[before]);
  if ((before + 1) % KEYFRAME_EVERY === 0) tape.keyframes.push(copy(tape.tip));
}

/** The result. Where it differs from the last frame (a text cut short, a word drawn again) that is one more frame. */
export function finish(tape, end) {
  const last = tape.frames.at(-1);
  const set = [], unset = [];
  for (let i = 0; i < tape.length; i++) {
    const id = i < end.tokens.length ? end.tokens[i] : null;
    if (id === tape.tip.ids[i] && (id === null || end.texts[i] === tape.tip.texts[i])) continue;
    if (id === null) unset.push(i);
    else set.push([i, id, end.texts[i]]);
  }
  if (set.length || unset.length) {
    append(tape, { step: last ? last.step : end.nfe, nfe: end.nfe, masked: unset.length ? last?.masked ?? 1 : 0, set, unset });
  }
  tape.end = end;
}

/** A tape as the events it was made of, and back: what a file or the recorded film holds. */
export const toEvents = ({ start, frames, end, marked }) => ({ start, frames, end, marked: [...marked] });

export function fromEvents({ start, frames, end, marked = [] }) {
  const tape = makeTape(start);
  for (const frame of frames) append(tape, frame);
  if (end) finish(tape, end);
  tape.marked = new Set(marked);
  return tape;
}

/** The canvas at index k. */
export function canvasAt(tape, k) {
  const from = Math.floor(k / KEYFRAME_EVERY);
  const canvas = copy(tape.keyframes[from]);
  for (let i = from * KEYFRAME_EVERY; i < k; i++) apply(canvas, tape.frames[i]);
  return canvas;
}

/** All there is to see at index k: the canvas, what the step did, the anchor network's guesses in the holes. */
export function stateAt(tape, k) {
  const { ids, texts } = canvasAt(tape, k);
  const frame = k > 0 ? tape.frames[k - 1] : null;
  const fresh = new Set(frame ? frame.set.map(([position]) => position) : []);
  const gone = new Map();
  if (frame && frame.unset.length) {
    const before = canvasAt(tape, k - 1);
    for (const position of frame.unset) if (texts[position] === null) gone.set(position, before.texts[position]);
  }
  const guesses = new Map();
  const source = tape.lastGuess[k];
  if (source >= 0) {
    for (const [position, , text, probability] of tape.frames[source].anchors) {
      if (ids[position] === null) guesses.set(position, [text, probability]);
    }
  }
  return {
    ids, texts, fresh, gone, guesses,
    step: frame ? frame.step : 0,
    nfe: frame ? frame.nfe : 0,
    masked: frame ? frame.masked : 1,
  };
}

/** The step at which each position got the token that stayed, null where it was given or is still masked. A word is
 * settled when its last token is, so all of a word have one number. */
export function settledSteps(tape) {
  const steps = Array(tape.length).fill(null);
  for (const frame of tape.frames) {
    for (const [position] of frame.set) if (!tape.fixed.has(position)) steps[position] = frame.step;
    for (const position of frame.unset) steps[position] = null;
  }
  let at = 0;
  for (const item of itemsOf(tape.tip.ids, tape.tip.texts)) {
    const size = item.kind === "hole" ? item.length : item.ids.length;
    if (item.kind === "word") {
      const own = steps.slice(at, at + size).filter((step) => step !== null);
      for (let i = at; i < at + size; i++) if (steps[i] !== null) steps[i] = Math.max(...own);
    }
    at += size;
  }
  return steps;
}

const mean = (numbers) => numbers.reduce((sum, x) => sum + x, 0) / numbers.length;

/** Mean step at which [marked words, all other words] settled; null where there are none. */
export function meanSteps(tape) {
  const steps = settledSteps(tape), marked = [], other = [];
  let at = 0;
  for (const item of itemsOf(tape.tip.ids, tape.tip.texts)) {
    if (item.kind === "word" && steps[at] !== null) (tape.marked.has(at) ? marked : other).push(steps[at]);
    at += item.kind === "hole" ? item.length : item.ids.length;
  }
  return [marked, other].map((all) => (all.length ? mean(all) : null));
}

const countHoles = (tokens) => tokens.filter((id) => id === null).length;

/** Steps of the whole run: some samplers draw one hole in each, whatever is asked for, and some add a few. Of a text in
 * blocks nobody knows them before its end, only how many they are at most. */
export function totalSteps(tape) {
  const { steps, steps_matter, tokens, block_length } = tape.start;
  if (block_length && tape.end) return Math.max(1, tape.frames.at(-1)?.step ?? 0);
  return Math.max(1, steps_matter ? steps : countHoles(tokens), tape.frames.at(-1)?.step ?? 0);
}

/** Frames to expect: a sampler that never masks again needs no more than there are holes. */
export function expectedFrames({ steps, steps_matter, writes_once, tokens }) {
  const holes = countHoles(tokens);
  if (!steps_matter) return holes;
  return writes_once ? Math.min(steps, holes) : steps;
}

/** Points of the plot: [step, masked fraction, evaluations], one for each index. */
export function curve(tape) {
  return [[0, 1, 0], ...tape.frames.map((f) => [f.step, f.masked, f.nfe])];
}
