// The canvas: lines of spans, one span for each position; a step touches only the spans that look different after it.
import { cell, keyOf, shownText, timeLevel } from "./cells.js";
import { settledSteps, stateAt, totalSteps } from "./frames.js";
import { guessLines, maskWidth, measuredLines } from "./lines.js";
import { wordAt } from "./template.js";

const element = (name, className = "", text = "") =>
  Object.assign(document.createElement(name), { className, textContent: text });

/** Spaces around a token carry no colour: only what is read does. */
const split = (text) => /^(\s*)(.*?)(\s*)$/s.exec(text).slice(1);

function tokenParts({ text, look }, first) {
  const [before, middle, after] = split(text);
  return [first ? "" : before, element("b", look, middle), after];
}

/** A mask in the place of its token: the token's letters, unseen, give it its width. A guess is shown if it fits. */
function placedHole({ text, look, room }, first) {
  const [before, middle, after] = split(room);
  const hole = element("i", `hole ${look}`, middle || "\u00a0\u00a0");
  if (text && text.length <= Math.max(2, middle.length)) hole.append(element("em", "", text));
  else if (text) hole.dataset.full = text;
  return [first ? "" : before, hole, after];
}

/** A mask whose token is not known: as wide as an average one, or as its guess. */
function openHole({ text, look }, width) {
  const hole = element("i", `hole open ${look}`, text || "\u00a0");
  hole.style.minWidth = `${width}em`;
  return [hole];
}

/** `onWord(position)` is called when a word is clicked. */
export function makeCanvas(root, onWord = () => {}) {
  let tape = null, state = null, spans = [], keys = [], hovered = [], lineWidth = 0, k = 0, first = false, changed = null;
  let beginnings = new Set(); // positions that begin a line: their space stays behind

  function reset(next) {
    tape = next;
    state = null;
    changed = null;
    lay();
    show(0);
  }

  /** Break lines anew: for another width, or because all words are known now. */
  function lay() {
    keys = Array(tape.length).fill("");
    spans = keys.map((_, i) => Object.assign(document.createElement("span"), { className: "cell" }));
    spans.forEach((span, i) => (span.dataset.i = i));
    lineWidth = root.clientWidth;
    const firsts = tape.end ? set() : guessLines(tape.start, emWidth());
    beginnings = new Set(firsts);
    if (tape.special.has(tape.start.tokens[0])) beginnings.add(1); // a begin token shows as nothing
    const lines = firsts.map((from, n) => {
      const line = element("span", "line");
      const before = (tape.end?.texts ?? tape.start.texts)[from - 1] ?? "";
      if (before.includes("\n")) line.classList.add("after");
      line.append(...spans.slice(from, firsts[n + 1]));
      return line;
    });
    root.replaceChildren(...lines);
  }

  /** The finished text as the browser breaks it. */
  function set() {
    const { tokens } = tape.end;
    const texts = spans.map((_, i) => tape.end.texts[i] ?? "");
    const flow = element("span", "flow");
    spans.forEach((span, i) => {
      const id = tokens[i] ?? null;
      const text = id === null ? "\u00a0\u00a0" : shownText(texts[i], tape.special.has(id), false);
      span.replaceChildren(...tokenParts({ text, look: "" }, i === 0));
      flow.append(span);
      if (texts[i].includes("\n")) flow.append(document.createElement("br"));
    });
    root.replaceChildren(flow);
    const firsts = measuredLines(spans, texts);
    for (const span of spans) span.replaceChildren();
    return firsts;
  }

  function emWidth() {
    const style = getComputedStyle(root);
    return (root.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight)) / parseFloat(style.fontSize);
  }

  function paint(span, c) {
    const i = Number(span.dataset.i), begins = beginnings.has(i);
    const look = changed?.has(i) ? `${c.look} changed`.trim() : c.look;
    if (c.kind === "hole") {
      span.replaceChildren(...(c.room === null ? openHole(c, maskWidth(tape.start)) : placedHole(c, begins)));
      span.firstElementChild.setAttribute("aria-hidden", "true"); // a mask is not text to be read out
      return;
    }
    // The same text with another look keeps its element, so that colours can fade.
    const word = span.querySelector("b");
    if (word && span.textContent === (begins ? c.text.trimStart() : c.text)) word.className = look;
    else span.replaceChildren(...tokenParts({ ...c, look }, begins));
  }

  /** Show index `next` of the tape. */
  function show(next) {
    unhover();
    k = Math.min(next, tape.frames.length);
    state = stateAt(tape, k);
    const times = first ? levels() : null, touched = new Set();
    for (let i = 0; i < spans.length; i++) {
      const c = cell(state, i, tape, times);
      const key = keyOf(c);
      if (key === keys[i]) continue;
      keys[i] = key;
      paint(spans[i], c);
      touched.add(spans[i].parentElement);
    }
    condense([...touched]);
    return state;
  }

  /** A line whose words are longer than was thought is set narrower: nothing moves to another line. */
  function condense(lines) {
    const fits = lines.map((line) => Math.min(1, line.clientWidth / line.scrollWidth));
    lines.forEach((line, n) => (line.style.transform = fits[n] < 1 ? `scaleX(${fits[n]})` : ""));
  }

  function levels() {
    const steps = totalSteps(tape);
    return settledSteps(tape).map((step) => (step === null ? null : timeLevel(step, steps)));
  }

  const position = (event) => {
    const span = event.target.closest("[data-i]");
    return span && root.contains(span) ? Number(span.dataset.i) : null;
  };

  function unhover() {
    for (const span of hovered) span.classList.remove("over");
    hovered = [];
  }

  root.addEventListener("pointerover", (event) => {
    unhover();
    const i = position(event);
    if (i === null || !state) return;
    const guess = state.guesses.get(i);
    if (guess) spans[i].title = `guess: ${guess[0].trim()}, ${Math.round(guess[1] * 100)} %`;
    else spans[i].removeAttribute("title");
    const range = wordAt(state.ids, state.texts, i);
    if (!range) return;
    hovered = spans.slice(...range);
    for (const span of hovered) span.classList.add("over");
  });
  root.addEventListener("pointerleave", unhover);
  root.addEventListener("click", (event) => {
    const i = position(event);
    // Marking text with the pointer is not a click on a word.
    if (i !== null && state && String(getSelection()) === "" && wordAt(state.ids, state.texts, i)) onWord(i);
  });
  new ResizeObserver(() => {
    if (tape && root.clientWidth && root.clientWidth !== lineWidth) {
      lay();
      show(k);
    }
  }).observe(root);

  return {
    reset, show,
    relay() { lay(); show(k); },
    state: () => state,
    span: (i) => spans[i],
    /** Colour words by the step at which they settled. */
    whatCameFirst(on) { first = on; keys.fill(""); show(k); },
    /** Point out positions that an infill has changed; null for none. */
    point(positions) { changed = positions; keys.fill(""); show(k); },
  };
}
