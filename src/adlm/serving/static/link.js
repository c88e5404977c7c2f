// Settings as the fragment of an address. The fragment never reaches a server's log, and holds no key.
import { DEFAULTS } from "./state.js";

const NUMBERS = new Set(["steps", "seed", "length", "block_length", "temperature", "top_p", "steps2"]);
const ALWAYS = new Set(["model", "sampler", "steps", "seed"]);
const FLAGS = new Set(["compare", "race"]);
const SECOND = new Set(["model2", "sampler2", "steps2"]);

/** Token ids with runs of masks as _n: 5,_3,7 is 5, three masks, 7. */
export function packTokens(tokens) {
  const parts = [];
  let masks = 0;
  for (const id of [...tokens, undefined]) {
    if (id === null) { masks++; continue; }
    if (masks) parts.push(`_${masks}`);
    masks = 0;
    if (id !== undefined) parts.push(String(id));
  }
  return parts.join(",");
}

const MOST_TOKENS = 65536; // a forged link must not fill the memory

export function unpackTokens(text) {
  const tokens = [];
  for (const part of text.split(",")) {
    const match = /^(_?)(\d{1,9})$/.exec(part);
    if (!match) return null;
    const number = Number(match[2]);
    if (match[1] && number + tokens.length > MOST_TOKENS) return null;
    if (match[1]) tokens.push(...Array(number).fill(null));
    else tokens.push(number);
  }
  return tokens;
}

/** The fragment without its #; what equals the default is left out. */
export function encode(settings, run = false) {
  const pairs = new URLSearchParams();
  for (const [name, fallback] of Object.entries(DEFAULTS)) {
    const value = settings[name];
    if (SECOND.has(name) && !settings.compare) continue;
    // Holes come twice: as token ids, exact, and as text, which the page can show before it has asked anything.
    if (name === "tokens") { if (value) pairs.set(name, packTokens(value)); }
    else if (FLAGS.has(name)) { if (value) pairs.set(name, "1"); }
    else if (ALWAYS.has(name) || SECOND.has(name) || value !== fallback) pairs.set(name, String(value));
  }
  if (run) pairs.set("run", "1");
  return pairs.toString();
}

/** {settings: only what the fragment names, run}. Unknown names and values that are not numbers are dropped. */
export function decode(fragment) {
  const pairs = new URLSearchParams(fragment.replace(/^#/, ""));
  const settings = {};
  for (const name of Object.keys(DEFAULTS)) {
    if (!pairs.has(name)) continue;
    const text = pairs.get(name);
    if (NUMBERS.has(name)) { if (text !== "" && Number.isFinite(Number(text))) settings[name] = Number(text); }
    else if (FLAGS.has(name)) settings[name] = text === "1";
    else if (name === "tokens") { const tokens = unpackTokens(text); if (tokens) settings[name] = tokens; }
    else settings[name] = text;
  }
  return { settings, run: pairs.get("run") === "1" };
}
