// What else could stand in the place of a word: it becomes a hole, the model fills it a few times, three different
// fillings are offered where the word stands.
import * as api from "./api.js";
import { finish, makeTape } from "./frames.js";
import { itemsOf, toTemplate, toTokens, wordAt } from "./template.js";
import { newSeed } from "./state.js";

const DRAWN = 8; // fillings asked for at once; of those alike one is shown
const LARGE = 5e7; // parameters from which on half of them are: nobody should wait for a CPU
const SHOWN = 3;
const ROUNDS = 3; // times to ask again while there are fewer

const button = (text, className, act) => {
  const made = Object.assign(document.createElement("button"), { type: "button", textContent: text, className });
  made.addEventListener("click", act);
  return made;
};

/** A word without the brackets before and the marks after it; null where nothing is left. */
export function lettersOf(range, texts) {
  if (!range) return null;
  let [from, to] = range;
  const isMark = (i) => !/[\p{L}\p{N}]/u.test(texts[i]);
  while (from < to && isMark(from) && texts[from] !== "") from++;
  while (to > from && isMark(to - 1) && texts[to - 1] !== "") to--;
  return from < to ? [from, to] : null;
}

/** The hole a word leaves, as a request: exact tokens for the model that wrote them, else the text. */
export function holeFor(ids, texts, [from, to], length, own) {
  const hole = { kind: "hole", length, was: [] };
  const items = [...itemsOf(ids.slice(0, from), texts.slice(0, from)), hole, ...itemsOf(ids.slice(to), texts.slice(to))];
  return own ? { tokens: toTokens(items) } : { template: toTemplate(items) };
}

/** Where the tokens between two texts stand: [from, to). Another model's tokens may be other ones. */
export function rangeBetween(texts, before, after) {
  let from = 0, to = texts.length;
  for (let size = 0; from < to && size < before.length; from++) size += texts[from].length;
  for (let size = 0; to > from && size < after.length; to--) size += texts[to - 1].length;
  while (from < to && texts[from] === "") from++; // a begin token
  return [from, to];
}

/** The fillings of some answers, the most frequent first, without the word that stood there and without empty ones. */
export function fillings(choices, before, after, was) {
  const found = new Map();
  for (const choice of choices) {
    const whole = choice.texts.join("");
    if (!whole.startsWith(before) || !whole.endsWith(after)) continue;
    const text = whole.slice(before.length, whole.length - after.length);
    const name = text.trim();
    if (!name || name.toLowerCase() === was.trim().toLowerCase()) continue;
    const known = found.get(name);
    if (known) known.count++;
    else found.set(name, { name, choice, range: rangeBetween(choice.texts, before, after), count: 1 });
  }
  return [...found.values()].sort((a, b) => b.count - a.count);
}

/** `settings()`: the form; `onTake(lane, tape)`: a filling was chosen; `onError(error)`. */
export function makeAlternatives({ settings, models, onTake, onCut, onError }) {
  const box = Object.assign(document.createElement("div"), { className: "alternatives", hidden: true });
  box.setAttribute("role", "dialog");
  box.setAttribute("aria-label", "Other words for this place");
  let open = null, controller = null;

  function close() {
    controller?.abort();
    controller = null;
    if (open) for (const span of open.spans) span.classList.remove("over");
    open = null;
    box.hidden = true;
  }

  function ask(lane, position) {
    const { ids, texts } = lane.state();
    const range = lettersOf(wordAt(ids, texts, position), texts);
    if (!range) return;
    close();
    const was = texts.slice(...range).join("");
    const spans = Array.from({ length: range[1] - range[0] }, (_, i) => lane.span(range[0] + i));
    open = { lane, ids: [...ids], texts: [...texts], range, was, spans, length: range[1] - range[0], known: [], seed: newSeed() };
    for (const span of spans) span.classList.add("over");
    lane.root.append(box);
    box.hidden = false;
    draw("Filling …");
    place(spans[0], lane.root);
    fill();
  }

  /** Below the word, inside the lane. */
  function place(span, root) {
    const at = span.getBoundingClientRect(), around = root.getBoundingClientRect();
    const left = Math.max(0, Math.min(at.left - around.left, around.width - box.offsetWidth));
    Object.assign(box.style, { left: `${left}px`, top: `${at.bottom - around.top + 4}px` });
  }

  async function fill() {
    const mine = (controller = new AbortController());
    const asked = open;
    try {
      for (let round = 0; round < ROUNDS && asked.known.length < SHOWN; round++) await fillOnce(asked, mine.signal);
      if (open === asked) draw(asked.known.length ? `Instead of “${asked.was.trim()}”` : "Nothing else comes to mind.");
    } catch (error) {
      if (open === asked) close();
      if (error.name !== "AbortError") onError(error);
    }
  }

  async function fillOnce(asked, signal) {
    const { ids, texts, range, length, lane } = asked;
    const form = settings();
    const own = models().some((m) => m.id === lane.tape.start.model) && !lane.recorded;
    const model = own ? lane.tape.start.model : form.model;
    const n = models().find((m) => m.id === model).parameters > LARGE ? DRAWN / 2 : DRAWN;
    const body = { model, ...holeFor(ids, texts, range, length, own), n, steps: Math.max(4, length), seed: asked.seed,
      sampler: form.sampler, temperature: form.temperature, top_p: form.top_p };
    asked.seed += n;
    const { choices } = await api.infill(body, signal);
    const [before, after] = [texts.slice(0, range[0]).join(""), texts.slice(range[1]).join("")];
    const more = fillings(choices, before, after, asked.was).filter((f) => !asked.known.some((k) => k.name === f.name));
    asked.known.push(...more.map((f) => ({ ...f, model, sampler: form.sampler })));
    if (open === asked && asked.known.length) draw("Filling …");
  }

  function draw(says) {
    const first = open.known.slice(0, SHOWN);
    const row = Object.assign(document.createElement("div"), { className: "row" });
    const size = Object.assign(document.createElement("span"), { textContent: `${open.length} token${open.length > 1 ? "s" : ""}` });
    row.append(
      button("More", "", () => { open.known = open.known.slice(SHOWN); draw("Filling …"); fill(); }),
      Object.assign(button("−", "", () => resize(-1)), { ariaLabel: "a shorter hole", disabled: open.length < 2 }),
      Object.assign(button("+", "", () => resize(1)), { ariaLabel: "a longer hole" }),
      button("Cut more holes", "", () => { const { lane, range } = open; close(); onCut(lane, range[0]); }),
      size,
    );
    const line = Object.assign(document.createElement("p"), { textContent: says });
    line.setAttribute("role", "status");
    box.replaceChildren(line, ...first.map((filling) => button(filling.name, "choice", () => take(filling))), row);
    if (first.length && !box.contains(document.activeElement)) box.querySelector(".choice").focus({ preventScroll: true });
  }

  function resize(by) {
    open.length = Math.max(1, open.length + by);
    open.known = [];
    draw("Filling …");
    fill();
  }

  /** The filling as a run of one frame, so that it can be replayed like any other. */
  function take({ choice, model, sampler, range: [from, to] }) {
    const { lane, ids, range } = open;
    const tokens = choice.tokens.map((id, i) => (i >= from && i < to ? null : id));
    const moved = choice.tokens.length - ids.length;
    const fixed = [...lane.tape.fixed].filter((i) => i < range[0] || i >= range[1]).map((i) => (i < from ? i : i + moved));
    const tape = makeTape({
      model, sampler, seed: choice.seed, steps: choice.nfe, steps_matter: true, writes_once: true, tokens, fixed,
      texts: choice.texts.map((text, i) => (tokens[i] === null ? null : text)), special: [...lane.tape.special],
    });
    finish(tape, choice);
    close();
    onTake(lane, tape);
  }

  document.addEventListener("pointerdown", (event) => {
    if (open && !box.contains(event.target) && !event.target.closest(".canvas")) close();
  });
  return { ask, close, isOpen: () => Boolean(open) };
}
