// A text with holes: pure functions on a list of items.
//   {kind: "word", ids, texts}            pieces that are read as one word
//   {kind: "still", ids, texts}           line breaks and begin or end tokens: shown, not clicked
//   {kind: "hole", length, was: [items]}  `was`: what a click puts back; empty for masks that came from the model

const startsWithSpace = (text) => /^\s/.test(text);
const isStill = (text) => text === "" || /^\s*\n\s*$/.test(text);

/** Items of a canvas; null ids are masks. A word runs to the next piece that starts with a space. */
export function itemsOf(ids, texts) {
  const items = [];
  ids.forEach((id, i) => {
    const last = items.at(-1);
    if (id === null) {
      if (last?.kind === "hole") last.length++;
      else items.push({ kind: "hole", length: 1, was: [] });
    } else if (isStill(texts[i])) {
      items.push({ kind: "still", ids: [id], texts: [texts[i]] });
    } else if (last?.kind === "word" && !startsWithSpace(texts[i]) && !last.texts.at(-1).endsWith("\n")) {
      last.ids.push(id);
      last.texts.push(texts[i]);
    } else {
      items.push({ kind: "word", ids: [id], texts: [texts[i]] });
    }
  });
  return items;
}

/** A word becomes a hole of as many tokens, joined to holes beside it; a hole becomes what it was. */
export function toggle(items, index) {
  const item = items[index];
  if (item.kind === "still" || (item.kind === "hole" && !item.was.length)) return items;
  const before = items.slice(0, index), after = items.slice(index + 1);
  if (item.kind === "hole") return [...before, ...item.was, ...after];
  let hole = { kind: "hole", length: item.ids.length, was: [item] };
  if (before.at(-1)?.kind === "hole") hole = join(before.pop(), hole);
  if (after[0]?.kind === "hole") hole = join(hole, after.shift());
  return [...before, hole, ...after];
}

// Masks of the model have nothing to put back: a hole that swallows some cannot be undone to the token.
const join = (a, b) => ({
  kind: "hole",
  length: a.length + b.length,
  was: a.was.length && b.was.length ? [...a.was, ...b.was] : [],
});

export function setLength(items, index, length) {
  const whole = Math.max(1, Math.round(length) || 1);
  return items.map((item, i) => (i === index ? { ...item, length: whole } : item));
}

/** Where an item that is now at `index` of `before` lies in `after`, the list a toggle made of it. */
export function indexAfter(before, after, index) {
  const offset = (items, end) => items.slice(0, end).reduce((sum, item) => sum + span(item), 0);
  const at = offset(before, index);
  let sum = 0;
  for (let i = 0; i < after.length; i++) {
    sum += span(after[i]);
    if (sum > at) return i;
  }
  return after.length - 1;
}

// Places that an item stands for in the list before anything was cut out.
const span = (item) => (item.kind === "hole" && item.was.length ? item.was.length : 1);

/** Token ids with null for each mask: exact, for the model that made them. */
export function toTokens(items) {
  return items.flatMap((item) => (item.kind === "hole" ? Array(item.length).fill(null) : item.ids));
}

/** The same as text, for a model with another vocabulary. */
export function toTemplate(items) {
  return items.map((i) => (i.kind === "hole" ? `[MASK:${i.length}]` : i.texts.join(""))).join("");
}

export function countHoles(items) {
  const holes = items.filter((item) => item.kind === "hole");
  return { holes: holes.length, masks: holes.reduce((sum, hole) => sum + hole.length, 0) };
}

/** The pieces [from, to) of the word that holds piece i of a canvas, or null. */
export function wordAt(ids, texts, i) {
  if (ids[i] === null || isStill(texts[i])) return null;
  let from = 0;
  for (const item of itemsOf(ids, texts)) {
    const to = from + (item.kind === "hole" ? item.length : item.ids.length);
    if (i < to) return [from, to];
    from = to;
  }
  return null;
}
