// Lanes: one run each, side by side in a comparison; all of them stand at the same number of frames.
import { makeCanvas } from "./canvas.js";
import { append, finish, makeTape, totalSteps } from "./frames.js";

export const percent = (fraction) => `${Math.round(fraction * 100)} %`;

/** What is said of a tape at one state: "step 12 of 64, 11 evaluations, 40 % masked". */
export function describe(tape, state) {
  const steps = `step ${state.step} of ${totalSteps(tape)}`;
  const nfe = `${state.nfe} evaluation${state.nfe === 1 ? "" : "s"}`;
  return `${steps}, ${nfe}, ${percent(state.masked)} masked`;
}

/** A lane in the page. `onWord(lane, position)` when a word of its canvas is clicked. */
export function makeLane(index, onWord) {
  const root = document.createElement("article");
  root.className = `lane lane${index}`;
  const head = document.createElement("header");
  const title = document.createElement("h2"), status = document.createElement("p"), copy = document.createElement("button");
  status.className = "status";
  Object.assign(copy, { type: "button", className: "quiet copy", textContent: "Copy text", hidden: true });
  head.append(title, copy);
  const canvas = document.createElement("p"), editor = document.createElement("p");
  canvas.className = "passage canvas";
  editor.className = "passage editor";
  editor.hidden = true;
  editor.setAttribute("role", "group");
  editor.setAttribute("aria-label", "Words; press one to make a hole");
  root.append(head, canvas, editor, status);
  const lane = { root, editor, canvas, tape: null, begin, receive, show, blank, say, busy };
  const view = makeCanvas(canvas, (position) => onWord(lane, position));

  function name(model, sampler, seed) {
    title.textContent = `${sampler} · ${model}`;
    title.title = `seed ${seed}`;
  }

  /** Masks before anything was asked for: what generation starts from. */
  function blank(length) {
    const nothing = Array(Math.max(1, length)).fill(null);
    lane.tape = makeTape({ tokens: nothing, texts: nothing, fixed: [], steps: 0 });
    lane.empty = true;
    title.textContent = "";
    head.hidden = copy.hidden = true;
    view.reset(lane.tape);
    say(`${nothing.length} masked tokens. Press Generate and watch them turn into text.`);
  }

  function begin(start) {
    lane.tape = makeTape(start);
    lane.empty = false;
    head.hidden = false;
    name(start.model, start.sampler, start.seed);
    canvas.style.minHeight = "";
    view.reset(lane.tape);
  }

  /** An event of the run; true if there is a new frame to show. */
  function receive(event, data) {
    if (event === "start") begin(data);
    else if (event === "frame") append(lane.tape, data);
    else if (event === "end") {
      finish(lane.tape, data);
      canvas.style.minHeight = ""; // masks now take the place of their tokens: the canvas has its last shape
    }
    return event !== "start";
  }

  function show(k) {
    if (!lane.tape || lane.empty) return null;
    const at = Math.min(k, lane.tape.frames.length);
    const state = view.show(at);
    const done = lane.tape.end && at === lane.tape.frames.length;
    const seconds = done && lane.tape.end.seconds ? `, ${lane.tape.end.seconds.toFixed(2)} s` : "";
    say(`${describe(lane.tape, state)}${seconds}`);
    // The tallest canvas so far is kept: the slider below it must not run away from the pointer.
    const height = canvas.offsetHeight;
    if (height > parseFloat(canvas.style.minHeight || 0)) canvas.style.minHeight = `${height}px`;
    return state;
  }

  function say(text) { status.textContent = text; }
  function busy(on) {
    root.classList.toggle("running", on);
    copy.hidden = on || !lane.tape?.end;
  }

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
  lane.state = view.state;
  return lane;
}
