// The form and the settings object: read, write, and keep the choices within what the chosen models offer.
import { DEFAULTS, SAMPLER_NOTES, fitToModel } from "./state.js";

const NUMBERS = ["steps", "seed", "length", "block_length", "temperature", "top_p", "steps2"];
const TEXTS = ["text", "required", "banned", "match", "model", "sampler", "model2", "sampler2"];

const option = (value, text = value) => Object.assign(document.createElement("option"), { value, textContent: text });

/** The block lengths of a model in words, 0 its own. */
function blockNames({ block_lengths: lengths, length }) {
  const name = (K) => (K === 1 ? "1: left to right" : K === length ? "the whole text" : `${K} tokens`);
  return [[0, `its own (${name(lengths[0])})`], ...lengths.map((K) => [K, name(K)])];
}

function size(parameters) {
  if (!parameters) return "";
  return parameters >= 1e6 ? `${(parameters / 1e6).toPrecision(3)}M` : `${Math.round(parameters / 1e3)}k`;
}

export function makeForm(form, onChange) {
  const field = (name) => form.elements.namedItem(name);
  let models = [];

  const byId = (id) => models.find((model) => model.id === id) ?? models[0];

  function read() {
    const settings = { ...DEFAULTS, compare: field("compare").checked };
    for (const name of NUMBERS) settings[name] = Number(field(name).value);
    for (const name of TEXTS) settings[name] = field(name).value;
    return settings;
  }

  function write(settings) {
    field("compare").checked = settings.compare;
    for (const [suffix, id] of [["", settings.model], ["2", settings.model2]]) {
      const model = byId(id);
      field(`model${suffix}`).value = model.id;
      field(`sampler${suffix}`).replaceChildren(...model.samplers.map((name) => option(name)));
    }
    const blocks = field("block_length"), { block_lengths: lengths } = byId(settings.model);
    blocks.replaceChildren(...(lengths.length ? blockNames(byId(settings.model)) : [[0, ""]]).map(([K, name]) => option(K, name)));
    blocks.parentElement.hidden = lengths.length < 2;
    for (const name of [...NUMBERS, ...TEXTS]) {
      if (name.startsWith("model")) continue;
      field(name).value = settings[name];
    }
    limit();
  }

  // The canvas must fit both models of a comparison.
  function limit() {
    const { compare, model, model2 } = read();
    const longest = Math.min(byId(model).length, compare ? byId(model2).length : Infinity);
    field("length").max = longest;
    if (Number(field("length").value) > longest) field("length").value = longest;
    form.querySelector("#second").hidden = !compare;
    form.querySelector("#note").textContent = SAMPLER_NOTES[field("sampler").value] ?? "";
    form.querySelector("#note2").textContent = SAMPLER_NOTES[field("sampler2").value] ?? "";
  }

  function setModels(list) {
    models = list;
    const choices = () => models.map((m) => option(m.id, [m.id, size(m.parameters)].filter(Boolean).join(" · ")));
    field("model").replaceChildren(...choices());
    field("model2").replaceChildren(...choices());
  }

  form.addEventListener("change", (event) => {
    const name = event.target.name;
    if (!models.length) return;
    if (name === "model") write(fitToModel(read(), byId(field("model").value)));
    if (name === "model2") {
      const settings = read();
      const fitted = fitToModel({ ...settings, sampler: settings.sampler2 }, byId(settings.model2));
      write({ ...settings, sampler2: fitted.sampler });
    }
    limit();
    if (name) onChange(name);
  });

  return { read, write, setModels, models: () => models, setSeed: (seed) => (field("seed").value = seed) };
}
