// The template editor: words that turn into holes by click or key, holes whose length is dragged, typed or stepped.
import { countHoles, indexAfter, setLength, toggle } from "./template.js";

const DRAG_PIXELS = 14; // pointer travel that adds or removes one mask
const LONGEST = 4096;

/** `onChange(items)` is called after every change. */
export function makeEditor(root, onChange) {
  let items = [], current = 0;

  const usable = (item) => item.kind !== "still";

  /** Start with these items, the focus on number `at` or on the first that can be changed. */
  function open(next, at = -1) {
    items = next;
    current = items[at] && usable(items[at]) ? at : items.findIndex(usable);
    draw();
    root.querySelector('[tabindex="0"]')?.focus();
    onChange(items);
  }

  function change(next, index) {
    current = indexAfter(items, next, index);
    items = next;
    draw();
    root.querySelector('[tabindex="0"]')?.focus();
    onChange(items);
  }

  function draw() {
    root.replaceChildren(...items.map(element));
  }

  function element(item, index) {
    if (item.kind === "still") return document.createTextNode(item.texts[0] || "\u25e6");
    const text = item.kind === "word" ? item.texts.join("") : "";
    const button = document.createElement("span");
    button.dataset.index = index;
    button.tabIndex = index === current ? 0 : -1;
    button.setAttribute("role", "button");
    if (item.kind === "word") {
      button.className = "word";
      button.textContent = text;
      button.setAttribute("aria-label", `${text.trim()}: make a hole`);
      return button;
    }
    const was = item.was.flatMap((w) => w.texts).join("").trim();
    button.className = "cut";
    button.setAttribute("aria-label", `hole of ${item.length} tokens${was ? `, was ${was}: put the words back` : ""}`);
    button.title = was ? `was: ${was}` : "masked by the model";
    button.append(...Array.from({ length: Math.min(item.length, 12) }, () => document.createElement("i")));
    const box = document.createElement("span");
    box.className = "cutbox";
    box.dataset.index = index;
    box.append(button, number(item), grip());
    const wrapped = document.createElement("span");
    // The space in front of a word belongs to the word: without it holes would stick to what stands before them.
    wrapped.append(" ", box);
    return wrapped;
  }

  function number(item) {
    const input = document.createElement("input");
    Object.assign(input, { type: "number", min: 1, max: LONGEST, value: item.length, title: "masks in this hole" });
    input.setAttribute("aria-label", "length of the hole in tokens");
    return input;
  }

  function grip() {
    const handle = document.createElement("span");
    handle.className = "grip";
    handle.title = "drag to change the length";
    handle.setAttribute("aria-hidden", "true"); // the number field does the same by keyboard
    return handle;
  }

  const indexOf = (target) => {
    const found = target.closest("[data-index]");
    return found ? Number(found.dataset.index) : null;
  };

  root.addEventListener("click", (event) => {
    const button = event.target.closest('[role="button"]');
    if (button) change(toggle(items, Number(button.dataset.index)), Number(button.dataset.index));
  });

  root.addEventListener("change", (event) => {
    if (event.target.matches("input")) resize(indexOf(event.target), Number(event.target.value), "input");
  });

  function resize(index, length, focus) {
    items = setLength(items, index, Math.min(length, LONGEST));
    draw();
    root.querySelector(`.cutbox[data-index="${index}"] ${focus}`)?.focus();
    onChange(items);
  }

  root.addEventListener("pointerdown", (event) => {
    if (!event.target.matches(".grip")) return;
    event.preventDefault();
    const index = indexOf(event.target), from = event.clientX, length = items[index].length;
    const move = (e) => resize(index, Math.max(1, length + Math.round((e.clientX - from) / DRAG_PIXELS)), "[role]");
    const stop = () => { removeEventListener("pointermove", move); removeEventListener("pointerup", stop); };
    addEventListener("pointermove", move);
    addEventListener("pointerup", stop);
  });

  root.addEventListener("keydown", (event) => {
    if (event.target.matches("input")) { event.stopPropagation(); return; }
    const index = indexOf(event.target);
    if (index === null || event.ctrlKey || event.metaKey) return; // Ctrl+Enter fills the holes
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (step) move(index, step);
    else if (event.key === "Home") move(-1, 1);
    else if (event.key === "End") move(items.length, -1);
    else if (event.key === "Enter" || event.key === " ") change(toggle(items, index), index);
    else if ("+-".includes(event.key) && items[index].kind === "hole") {
      resize(index, items[index].length + (event.key === "+" ? 1 : -1), "[role]");
    } else return;
    event.preventDefault();
    event.stopPropagation(); // arrows scrub and space plays elsewhere on the page
  });

  function move(from, step) {
    let index = from + step;
    while (items[index] && !usable(items[index])) index += step;
    if (!items[index]) return;
    current = index;
    for (const button of root.querySelectorAll('[role="button"]')) {
      button.tabIndex = Number(button.dataset.index) === index ? 0 : -1;
    }
    root.querySelector('[tabindex="0"]').focus();
  }

  return { open, items: () => items, count: () => countHoles(items) };
}
