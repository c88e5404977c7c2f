// A text the reader typed, as items of the template editor: the server knows how it is cut into tokens.
import { tokenize } from "./api.js";
import { HOLE } from "./holes.js";
import { itemsOf } from "./template.js";

/** Words and holes (null for each mask) of a text, as the canvas shows it before anything was asked of the server. */
export function templateTexts(text) {
  return text.split(new RegExp(`(${HOLE.source})`)).flatMap((part, i) => {
    if (i % 3 === 1) return Array(Math.min(4096, Number(HOLE.exec(part)[1] ?? 1))).fill(null);
    return i % 3 === 0 ? part.match(/\s*\S+|\s+/g) ?? [] : []; // every third is the number inside the hole
  });
}

/** Items of a typed text; [MASK:n] are holes already. */
export async function typedItems(model, text) {
  // A space before a hole belongs to the word that fills it, as the server reads templates too.
  const parts = text.split(new RegExp(` ?(${HOLE.source.replace("(\\d+)", "\\d+")})`)).filter(Boolean);
  const items = [];
  for (const part of parts) {
    const hole = HOLE.exec(part);
    if (hole && hole[0] === part) items.push({ kind: "hole", length: Number(hole[1] ?? 1), was: [] });
    else {
      const { tokens, texts } = await tokenize(model, part);
      items.push(...itemsOf(tokens, texts));
    }
  }
  return items;
}
