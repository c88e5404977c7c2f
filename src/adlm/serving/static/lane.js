// Lanes: one run each, side by side in a comparison; all of them stand at the same number of frames. A lane remembers
// the texts it held before, so that an infill can be undone and compared.
import { makeCanvas } from "./canvas.js";
import { append, finish, fromEvents, makeTape, meanSteps, totalSteps } from "./frames.js";
import { isTelling, markedPositions } from "./words.js";

export const percent = (fraction) => `${Math.round(fraction * 100)} %`;
const plural = (n, word) => `${n} ${word}${n === 1 ? "" : "s"}`;

/** What is said of a tape at one state: "step 12 of 64, 11 evaluations, 40 % masked". */
export function describe(tape, state) {
  return `step ${state.step} of ${totalSteps(tape)}, ${plural(state.nfe, "evaluation")}, ${percent(state.masked)} masked`;
}

/** Positions between the beginning and the end that two lists of tokens share: [of a, of b]. */
export function difference(a, b) {
  let from = 0, less = 0;
  while (from < Math.min(a.length, b.length) && a[from] === b[from]) from++;
  while (less < Math.min(a.length, b.length) - from && a.at(-1 - less) === b.at(-1 - less)) less++;
  return [a, b].map((all) => new Set(all.map((_, i) => i).slice(from, all.length - less)));
}

function makeFrame(index) {
  const make = (name, className) => Object.assign(document.createElement(name), { className });
  const root = make("article", `lane lane${index}`), head = make("header", ""), title = make("h2", "");
  const copy = Object.assign(make("button", "quiet copy"), { type: "button", textContent: "Copy text", hidden: true });
  const canvas = make("p", "passage canvas"), editor = make("p", "passage editor"), status = make("p", "status");
  head.append(title, copy);
  editor.hidden = true;
  editor.setAttribute("role", "group");
  editor.setAttribute("aria-label", "Words; press one to make a hole");
  root.append(head, canvas, editor, status);
  return { root, title, copy, canvas, editor, status };
}

/** A lane in the page. `onWord(lane, position)` when a word of its canvas is clicked; `ranks()`: see words.js. */
export function makeLane(index, onWord, ranks) {
  const { root, title, copy, canvas, editor, status } = makeFrame(index);
  const lane = { root, editor, canvas, tape: null, empty: true, past: [] };
  const view = makeCanvas(canvas, (position) => onWord(lane, position));
  let first = false;

  function put(tape) {
    lane.tape = tape;
    lane.empty = false;
    view.reset(tape);
  }

  function name({ model, sampler, seed }, recorded = false) {
    lane.recorded = recorded;
    lane.name = sampler === "autoregressive" ? "left to right" : sampler;
    title.textContent = [recorded ? "Recorded" : "", lane.name, model].filter(Boolean).join(" · ");
    title.title = `seed ${seed}`;
  }

  const mark = () => (lane.tape.marked = markedPositions(lane.tape.end.tokens, lane.tape.end.texts, lane.tape.fixed, ranks()));
  /** Of the guesses only whole content words: the others say nothing of what the text will be about. */
  const telling = (frame) => ({ ...frame, anchors: (frame.anchors ?? []).filter(([, , text]) => isTelling(text, ranks())) });

  /** Masks, or a template, before anything was asked for. */
  lane.blank = (texts) => {
    lane.tape = makeTape({ tokens: texts.map((text) => (text === null ? null : -1)), texts, fixed: texts.keys(), steps: 0 });
    lane.empty = true;
    title.textContent = "";
    copy.hidden = true;
    view.reset(lane.tape);
    const masks = texts.filter((text) => text === null).length;
    lane.say(`${plural(masks, "masked token")} to fill.`);
  };

  /** A recorded run. */
  lane.play = (events) => {
    put(fromEvents({ ...events, frames: events.frames.map(telling) }));
    mark();
    name(events.start, true);
    copy.hidden = false;
  };

  /** Another text in the place of this one; `undo` brings the present one back. */
  lane.replace = (tape) => {
    lane.loosen();
    lane.past.push(lane.tape);
    put(tape);
    if (tape.end) mark();
    name(tape.start);
  };

  lane.undo = () => {
    if (!lane.past.length) return false;
    put(lane.past.pop());
    name(lane.tape.start);
    return true;
  };

  /** Show the text before the last infill, or the one after it, the words that differ pointed out. */
  lane.before = (on) => {
    const was = lane.past.at(-1);
    if (!was?.end || !lane.tape.end) return;
    const [old, now] = difference(was.end.tokens, lane.tape.end.tokens);
    view.reset(on ? was : lane.tape);
    view.show(Infinity);
    view.point(on ? old : now);
  };

  function begin(start) {
    if (lane.keepPast && lane.tape?.end) lane.past.push(lane.tape);
    else lane.past = [];
    lane.keepPast = false;
    put(makeTape(start));
    name(start);
  }

  /** An event of the run; true if there is a new frame to show. */
  lane.receive = (event, data) => {
    if (event === "start") begin(data);
    else if (event === "frame") append(lane.tape, telling(data));
    else if (event === "end") {
      finish(lane.tape, data);
      mark();
      lane.loosen(); // the lines are known now
      view.relay();
    }
    return event !== "start";
  };

  lane.show = (k) => {
    if (!lane.tape || lane.empty) return null;
    const at = Math.min(k, lane.tape.frames.length);
    const state = view.show(at);
    lane.say(saying(state, at === lane.tape.frames.length));
    // The tallest canvas so far is kept: what stands below it must not jump.
    const height = canvas.offsetHeight;
    if (height > parseFloat(canvas.style.minHeight || 0)) canvas.style.minHeight = `${height}px`;
    return state;
  };

  function saying(state, done) {
    const { tape } = lane;
    if (first && tape.end) {
      const [marked, other] = meanSteps(tape);
      if (marked === null || other === null) return "Words are coloured by the step at which they settled.";
      return `Underlined words settled at step ${marked.toFixed(0)} on average, the others at step ${other.toFixed(0)}.`;
    }
    const seconds = done && tape.end?.seconds ? `, ${tape.end.seconds.toFixed(1)} s` : "";
    return `${describe(tape, state)}${seconds}`;
  }

  lane.whatCameFirst = (on) => { first = on; if (lane.tape) view.whatCameFirst(on); };
  lane.say = (text) => { status.textContent = text; };
  lane.busy = (on) => {
    root.classList.toggle("running", on);
    canvas.setAttribute("aria-busy", on);
    copy.hidden = on || !lane.tape?.end;
  };
  lane.loosen = () => { canvas.style.minHeight = ""; };
  lane.state = view.state;
  lane.span = view.span;

  copy.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(lane.tape.end.text);
      copy.textContent = "Copied";
    } catch {
      // No clipboard without a secure origin: mark the text, so that the keyboard can copy it.
      getSelection().selectAllChildren(canvas);
      copy.textContent = "Marked";
    }
    setTimeout(() => (copy.textContent = "Copy text"), 1500);
  });
  return lane;
}
