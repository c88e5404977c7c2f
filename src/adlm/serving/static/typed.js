// A text the reader typed, as items of the template editor: the server knows how it is cut into tokens.
import { tokenize } from "./api.js";
import { itemsOf } from "./template.js";

/** Items of a typed text; [MASK:n] are holes already. */
export async function typedItems(model, text) {
  // A space before a hole belongs to the word that fills it, as the server reads templates too.
  const parts = text.split(/ ?(\[MASK(?::\d+)?\])/).filter(Boolean);
  const items = [];
  for (const part of parts) {
    const hole = /^\[MASK(?::(\d+))?\]$/.exec(part);
    if (hole) items.push({ kind: "hole", length: Number(hole[1] ?? 1), was: [] });
    else {
      const { tokens, texts } = await tokenize(model, part);
      items.push(...itemsOf(tokens, texts));
    }
  }
  return items;
}
