// What a run is asked for, as one plain object, and the request bodies made of it. `text` is what the reader typed and is
// never changed; holes cut into a text are `tokens` (for the model that made them) and `template` (for any model).
import { HOLE } from "./holes.js";

export const DEFAULTS = Object.freeze({
  model: "", sampler: "", steps: 64, seed: 1, length: 0, block_length: 0, temperature: 1, top_p: 0.9,
  text: "", tokens: null, template: "", required: "", banned: "", match: "",
  compare: false, race: false, model2: "", sampler2: "", steps2: 64,
});

/** One line for each sampler: what the eye will see. */
export const SAMPLER_NOTES = Object.freeze({
  "mdlm": "Reveals at random places; a token stays once drawn.",
  "remdm-cap": "Masks a small fraction again at every step and corrects itself.",
  "remdm-rescale": "Masks again in proportion to what is possible at each step.",
  "remdm-conf": "Masks again where the model was unsure.",
  "remdm-loop": "Writes most of it, then masks and corrects in a loop, then finishes.",
  "forward-backward": "Reveals and takes back at the same rate: a corrector.",
  "dfm": "Discrete flow matching with a corrector.",
  "ddpm": "Like mdlm, along the schedule of training.",
  "analytic": "The same step in score form.",
  "first-hitting": "One token at a time, at exact random times.",
  "confidence": "Reveals first where the model is surest.",
  "entropy": "Reveals first where little is left open.",
  "anchor-first": "Reveals first where the anchor network is sure of a rare word.",
  "autoregressive": "Left to right, one token at a time.",
});

export const words = (text) => text.split(",").map((word) => word.trim()).filter(Boolean);
const LEFT_TO_RIGHT = "autoregressive";
const LENGTH = 64; // of the first text: within seconds on a CPU, and its masks do not fill the screen of a phone

/** What holes must become: a regular expression between slashes, or one of some texts. */
export function constraint(match) {
  const regex = /^\s*\/(.+)\/\s*$/.exec(match);
  if (regex) return { regex: regex[1] };
  return words(match).length ? { choices: words(match) } : {};
}

export const hasHoles = (settings) => Boolean(settings.tokens || settings.template || HOLE.test(settings.text));

/** The block length that shows several words at once: the model's own (0), unless that is one token. */
export const blockToWatch = (model) =>
  (model.block_lengths[0] === 1 ? model.block_lengths.find((K) => K > 1 && K < model.length) ?? 0 : 0);

/** A race: the same model and seed, left to right in the second lane. */
export const raceSettings = (settings, model) => ({
  ...settings, race: true, compare: true, model2: settings.model, sampler2: LEFT_TO_RIGHT, steps2: settings.steps,
  block_length: settings.block_length || blockToWatch(model),
  block_length2: model.block_lengths.includes(1) ? 1 : settings.block_length,
});

export const canRace = (model) => Boolean(model && !model.causal && model.samplers.includes(LEFT_TO_RIGHT));

/** Body of /v1/frames for lane 0 or, in a comparison, lane 1: the same text, seed and filters, another sampler or model. */
export function bodyFor(settings, lane = 0) {
  const second = lane === 1;
  const body = {
    model: second ? settings.model2 : settings.model,
    sampler: second ? settings.sampler2 : settings.sampler,
    steps: second ? settings.steps2 : settings.steps,
    seed: settings.seed,
    temperature: settings.temperature,
    top_p: settings.top_p,
    anchors: true,
  };
  const own = settings.model2 === settings.model ? settings.block_length : 0;
  const block = second ? settings.block_length2 ?? own : settings.block_length;
  const planned = hasHoles(settings) || words(settings.required).length > 0; // on the whole canvas
  if (block && !planned) body.block_length = block;
  if (settings.tokens && (!second || settings.model2 === settings.model)) body.tokens = settings.tokens;
  else if (hasHoles(settings)) body.template = settings.template || settings.text;
  else {
    if (settings.text) body.prompt = settings.text;
    if (settings.length) body.length = settings.length;
  }
  for (const name of ["required", "banned"]) {
    const list = words(settings[name]);
    if (list.length) body[name] = list;
  }
  return { ...body, ...constraint(settings.match) };
}

/** Settings a model can follow: its samplers, its length; what it has no say in is kept. */
export function fitToModel(settings, model) {
  const fitted = { ...settings, model: model.id };
  if (!model.samplers.includes(fitted.sampler)) fitted.sampler = model.default?.sampler ?? model.samplers[0];
  if (!model.block_lengths.includes(fitted.block_length)) fitted.block_length = 0;
  if (!fitted.length || fitted.length > model.length) fitted.length = model.length;
  return fitted;
}

/** The form at the first visit: what the server proposes for its first model, and a second sampler that differs. */
export function firstSettings(models) {
  const [model] = models;
  const known = Object.entries(model.page ?? {}).filter(([name]) => name in DEFAULTS);
  const length = Math.min(model.length, LENGTH);
  const settings = fitToModel({ ...DEFAULTS, ...Object.fromEntries(known), length }, model);
  const other = model.samplers.find((s) => s === "remdm-loop" && s !== settings.sampler)
    ?? model.samplers.find((s) => s !== settings.sampler) ?? settings.sampler;
  return { ...settings, model2: model.id, sampler2: other, steps2: settings.steps };
}

/** The first model or sampler of the settings that is not there, in words; "" if all are. */
export function unknownName(settings, models) {
  const pairs = [[settings.model, settings.sampler]];
  if (settings.compare) pairs.push([settings.model2, settings.sampler2]);
  for (const [id, sampler] of pairs) {
    const model = models.find((m) => m.id === id);
    if (!model) return `the model ${id}`;
    if (!model.samplers.includes(sampler)) return `the sampler ${sampler} for ${id}`;
  }
  return "";
}

export const newSeed = () => Math.floor(Math.random() * 100000);
