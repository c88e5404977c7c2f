// Which words say what a text is about: rare ones of the text the model in the package learned from (English). The list
// of the server has content words only, commonest first, so function words, punctuation and line breaks have no rank.
import { itemsOf } from "./template.js";

const FIRST_RANK = 600; // commoner words are in every text: "time", "known", "city"
const MOST = 0.12; // fraction of a text's words that are marked at most; where all is marked, nothing is

/** Rank of each word, from the server's list. */
export async function loadRanks() {
  const response = await fetch("/static/words.txt");
  const lines = response.ok ? (await response.text()).split("\n") : [];
  return new Map(lines.filter(Boolean).map((word, rank) => [word, rank]));
}

/** The word inside a piece of text, as the list writes it; "" where there is none or more than one. */
export function bare(text) {
  const found = text.toLowerCase().match(/[\p{L}\p{M}]+/gu) ?? [];
  return found.length === 1 ? found[0] : "";
}

/** Whether a guess is worth showing: one whole content word. A piece without its space continues a word. */
export const isTelling = (text, ranks) => /^\s/.test(text) && ranks.has(bare(text));

/** Positions of a finished text whose words are marked: the rarest, never many. Words that were given are not. */
export function markedPositions(ids, texts, given, ranks) {
  const words = [];
  let at = 0;
  for (const item of itemsOf(ids, texts)) {
    const positions = (item.ids ?? Array(item.length).fill(null)).map((_, i) => at + i);
    at += positions.length;
    if (item.kind === "word") words.push({ positions, rank: ranks.get(bare(item.texts.join(""))) ?? -1 });
  }
  const rare = words.filter((w) => w.rank >= FIRST_RANK && !w.positions.some((i) => given.has(i)));
  rare.sort((a, b) => b.rank - a.rank);
  return new Set(rare.slice(0, Math.floor(words.length * MOST)).flatMap((w) => w.positions).filter((i) => /\p{L}/u.test(texts[i])));
}
