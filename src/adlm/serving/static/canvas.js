// The canvas: one span for each position; a step touches only the spans that look different after it.
import { cell, keyOf } from "./cells.js";
import { stateAt } from "./frames.js";
import { wordAt } from "./template.js";

/** Spaces around a token carry no colour: only what is read does. */
function tokenParts({ text, look }) {
  const word = document.createElement("b");
  const [, before, middle, after] = /^(\s*)(.*?)(\s*)$/s.exec(text);
  word.className = look;
  word.textContent = middle;
  return [before, word, after];
}

/** `onWord(position)` is called when a word is clicked. */
export function makeCanvas(root, onWord) {
  let tape = null, state = null, spans = [], keys = [], hovered = [];

  function reset(next) {
    tape = next;
    keys = Array(tape.length).fill("");
    spans = keys.map((_, i) => {
      const span = document.createElement("span");
      span.dataset.i = i;
      return span;
    });
    root.replaceChildren(...spans);
    show(0);
  }

  function paint(span, c) {
    if (c.kind === "token") {
      // The same text with another look keeps its element, so that colours can fade.
      const word = span.querySelector("b");
      if (word && span.textContent === c.text) word.className = c.look;
      else span.replaceChildren(...tokenParts(c));
      return;
    }
    const hole = document.createElement("i");
    hole.className = `hole ${c.look}`;
    hole.style.marginLeft = `${c.before}ch`;
    hole.style.width = `${c.width}ch`;
    // Some width must be left to see where one mask ends and the next begins, and a mask is not text to be read out.
    hole.setAttribute("aria-hidden", "true");
    hole.textContent = c.text || "\u00a0";
    span.replaceChildren(hole, c.tail);
  }

  /** Show index k of the tape. */
  function show(k) {
    unhover();
    state = stateAt(tape, k);
    for (let i = 0; i < spans.length; i++) {
      const c = cell(state, i, tape);
      const key = keyOf(c);
      if (key === keys[i]) continue;
      keys[i] = key;
      paint(spans[i], c);
    }
    return state;
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
    if (guess) spans[i].title = `anchor network: "${guess[0].trim()}", ${Math.round(guess[1] * 100)} %`;
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

  return { reset, show, state: () => state };
}
