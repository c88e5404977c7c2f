// Wires the parts together: form, runs, lanes, player, plots, link. What each does is in its own module.
import * as api from "./api.js";
import { makeAlternatives } from "./alternatives.js";
import { snippets } from "./code.js";
import { makeCutting } from "./cutting.js";
import { drawChips } from "./examples.js";
import { makeForm } from "./form.js";
import { curve } from "./frames.js";
import { mended, nearHoles } from "./holes.js";
import { listen } from "./keys.js";
import { makeLane } from "./lane.js";
import { decode, encode } from "./link.js";
import { makeNotice } from "./notice.js";
import { makePlayer } from "./player.js";
import { makePlot } from "./plot.js";
import { makeRace } from "./race.js";
import { makeRuns } from "./runs.js";
import { saveGif, saveHtml } from "./save.js";
import { blockToWatch, bodyFor, canRace, firstSettings, hasHoles, newSeed, raceSettings, unknownName } from "./state.js";
import { templateTexts } from "./typed.js";
import { loadRanks } from "./words.js";

const $ = (id) => document.getElementById(id);
const stillness = matchMedia("(prefers-reduced-motion: reduce)");
const phone = matchMedia("(max-width: 40rem)");

let lanes = [];
let ranks = new Map();
let last = null; // settings of the run on the canvas
let holes = null; // {tokens, template}: what "Fill holes" fills, cut by hand or come with a link
let plotQueued = false;

const form = makeForm($("form"), (name) => {
  if (["compare", "length", "model"].includes(name) && !runs.isRunning()) layLanes();
  if (name === "model") describeModel();
});
const notice = makeNotice($("notice"), $("unlock"), () => (form.models().length ? runs.start(last ?? settingsNow()) : load()));
const player = makePlayer({ show, changed }, () => stillness.matches);
const plots = [
  makePlot($("plot-masked"), { column: 1, label: "Fraction of masked tokens against steps", percent: true }, scrubTo),
  makePlot($("plot-nfe"), { column: 2, label: "Network evaluations against steps" }, scrubTo),
];
const race = makeRace($("board"));
const written = () => lanes.filter((lane) => lane.tape && !lane.empty);
const runs = makeRuns({
  lanes: () => lanes, written, show, changed: () => changed(player.now()), edited, player, notice, race,
  prepare(settings) {
    cutting.leave();
    alternatives.close();
    last = settings;
    layLanes(settings.compare ? 2 : 1);
    pressed("before", false);
  },
});
const cutting = makeCutting({
  lanes: () => lanes, form, player, notice, isRunning: runs.isRunning,
  typed: () => (form.read().text.trim() && (lanes[0].empty || lanes[0].recorded || last?.text !== form.read().text) ? form.read().text : ""),
});
const alternatives = makeAlternatives({
  settings: form.read, models: form.models, onCut: cutting.cutAt, onError: notice.show,
  onTake(lane, tape) {
    lane.replace(tape);
    player.begin(tape.frames.length);
    player.grow(runs.frameCount());
    player.end();
    player.go(Infinity);
    edited();
  },
});

// Lanes

function layLanes(count = form.read().compare ? 2 : 1) {
  while (lanes.length > count) lanes.pop().root.remove();
  while (lanes.length < count) {
    const lane = makeLane(lanes.length, clicked, () => ranks);
    lane.whatCameFirst($("camefirst").ariaPressed === "true");
    lanes.push(lane);
    $("lanes").append(lane.root);
  }
  $("lanes").classList.toggle("two", count === 2);
  for (const lane of lanes) if (!lane.tape || lane.empty) lane.blank(blankTexts());
  changed(player.now());
}

/** A word of a finished text has alternatives; one of a text in the making becomes a hole beside the others. */
function clicked(lane, position) {
  if (runs.isRunning()) return;
  if (lane.state().ids.includes(null)) cutting.cutAt(lane, position);
  else alternatives.ask(lane, position);
}

/** What a run would start from: the text with its holes, or masks. */
function blankTexts() {
  const { text, length } = form.read();
  const template = holes?.template || text;
  if (hasHoles({ text: template })) return templateTexts(template);
  const given = text ? templateTexts(text) : [];
  return [...given, ...Array(Math.max(1, (length || 64) - given.length)).fill(null)];
}

function show(k) {
  for (const lane of lanes) lane.show(k);
}

function changed({ k, playing, live, end, length }) {
  const slider = $("slider");
  slider.max = end;
  slider.value = k;
  slider.setAttribute("aria-valuetext", written().map((lane) => lane.root.querySelector(".status").textContent).join("; "));
  $("play").classList.toggle("playing", playing);
  $("play").setAttribute("aria-label", playing ? "Pause" : "Play");
  slider.disabled = $("play").disabled = length === 0 && !live;
  $("cut").disabled = runs.isRunning();
  const whole = !runs.isRunning() && written().some((lane) => lane.tape.end);
  $("savehtml").disabled = $("savegif").disabled = !whole;
  if (!plotQueued && $("charts").open) {
    plotQueued = true;
    requestAnimationFrame(() => {
      plotQueued = false;
      for (const plot of plots) plot.draw(written().map((l) => l.tape), player.now().k, form.read().steps || 1);
    });
  }
}

/** A click in a plot: the first frame of the first lane at or after that step. */
function scrubTo(step) {
  const [lane] = written();
  if (!lane) return;
  const index = curve(lane.tape).findIndex(([s]) => s >= step);
  player.go(index < 0 ? lane.tape.frames.length : index);
}

const pressed = (id, on) => $(id).setAttribute("aria-pressed", on);

function view(first) {
  pressed("writing", !first);
  pressed("camefirst", first);
  $("legend").hidden = first;
  $("legendfirst").hidden = !first;
  for (const lane of lanes) {
    lane.whatCameFirst(first);
    lane.show(player.now().k);
  }
}

// Changes of the text, and back

function edited() {
  $("edits").hidden = !lanes.some((lane) => lane.past.length);
  pressed("before", false);
}

function undo() {
  alternatives.close();
  const lane = lanes.find((one) => one.past.length);
  if (!lane?.undo()) return;
  player.begin(lane.tape.frames.length);
  player.grow(runs.frameCount());
  player.end();
  player.go(Infinity);
  edited();
}

function before() {
  const on = $("before").ariaPressed !== "true";
  pressed("before", on);
  for (const lane of lanes) lane.before(on);
}

// Runs

/** The model that the form names. */
const chosen = () => form.models().find((m) => m.id === form.read().model);

/** The form as it stands, with the holes that were cut and a new seed where the reader wants one. */
function settingsNow() {
  if ($("vary").checked) form.setSeed(newSeed());
  return { ...form.read(), ...(holes ?? {}) };
}

const valid = () => {
  if (!$("form").checkValidity()) $("settings").open = true; // a field that is out of range must be seen
  return $("form").reportValidity();
};

function generate() {
  if (valid()) runs.start(settingsNow(), Boolean(holes));
}

function infill() {
  const cut = cutting.holes();
  if (!cut || !valid()) return;
  keepHoles(cut);
  runs.start(settingsNow(), true);
}

function keepHoles(next) {
  holes = next;
  $("clear").hidden = !holes;
  relabel();
}

function relabel() {
  $("generate").textContent = hasHoles({ ...form.read(), ...(holes ?? {}) }) ? "Fill holes" : "Generate";
}

function pick({ text, sampler, race: racing }) {
  keepHoles(null);
  const model = chosen();
  const block_length = sampler ? blockToWatch(model) : 0;
  form.write({ ...form.read(), text, sampler: sampler ?? model.page.sampler, block_length, compare: false });
  typed();
  const settings = settingsNow();
  runs.start(racing ? raceSettings(settings, model) : settings);
  $("lanes").scrollIntoView({ block: "nearest", behavior: stillness.matches ? "auto" : "smooth" });
}

/** Holes that were meant but not written so: say it before the run, change nothing unasked. */
function typed() {
  const near = nearHoles($("text").value);
  const hint = $("hint");
  hint.hidden = !near.length;
  if (near.length) {
    const button = Object.assign(document.createElement("button"), { type: "button", textContent: "Make it a hole" });
    button.addEventListener("click", () => {
      $("text").value = mended($("text").value);
      typed();
      $("text").focus();
    });
    hint.replaceChildren(`${near[0].written} is read as words. A hole is written ${near[0].meant}.`, button);
  }
  relabel();
}

function describeModel() {
  const model = chosen();
  $("legendguess").hidden = !model?.anchored;
  $("race").hidden = !canRace(model);
  drawChips($("chips"), model, canRace(model), pick);
}

// This run, elsewhere

async function copied(text, where) {
  try {
    await navigator.clipboard.writeText(text);
    return "Copied.";
  } catch {
    return where;
  }
}

async function share() {
  const settings = { ...form.read(), ...(cutting.holes() ?? holes ?? {}), race: Boolean(last?.race) };
  if (settings.race) Object.assign(settings, raceSettings(settings, chosen()));
  history.replaceState(null, "", `#${encode(settings, $("runs").checked)}`);
  $("said").textContent = `${await copied(location.href, "")} The address bar holds the link.`.trim();
}

function showCode() {
  const codes = snippets(bodyFor({ ...form.read(), ...(holes ?? {}) }), location.origin, api.hasKey());
  const choose = (name) => {
    $("snippet").textContent = codes[name];
    for (const button of $("languages").children) button.setAttribute("aria-pressed", button.textContent === name);
  };
  $("languages").replaceChildren(...Object.keys(codes).map((name) => {
    const button = Object.assign(document.createElement("button"), { type: "button", textContent: name });
    button.addEventListener("click", () => choose(name));
    return button;
  }));
  choose("curl");
  $("codes").showModal();
}

async function save(act) {
  const k = player.now().k;
  player.pause();
  $("said").textContent = "Drawing …";
  try {
    await act();
    $("said").textContent = "Saved.";
  } catch (error) {
    $("said").textContent = `It could not be saved: ${error.message}`;
  }
  player.go(k);
}

const goTo = (k) => written()[0].show(k);
const say = (text) => { $("said").textContent = text; };

function openLink() {
  const { settings, run } = decode(location.hash);
  const models = form.models();
  const named = Object.keys(settings).length > 0;
  const whole = { ...firstSettings(models), ...settings };
  const problem = unknownName(whole, models);
  form.write(whole);
  if ("seed" in settings) $("vary").checked = false;
  $("lanes").classList.remove("waiting");
  const { tokens, template, ...rest } = whole;
  keepHoles(tokens || template ? { tokens, template } : null);
  describeModel();
  typed();
  if (named) for (const lane of lanes) lane.empty = true;
  layLanes();
  if (problem) return notice.show({ message: `This link names ${problem}, which this server does not have.` });
  last = null;
  const go = () => {
    const now = { ...rest, ...form.read(), ...(holes ?? {}) };
    runs.start(whole.race ? raceSettings(now, chosen()) : now);
  };
  if (run) go();
  else if (named) {
    const button = Object.assign(document.createElement("button"), { type: "button", textContent: hasHoles(whole) ? "Fill holes" : "Run" });
    button.addEventListener("click", go);
    notice.tell(hasHoles(whole) ? "A text with holes came with this link." : "Settings of the link are in place.", button);
  }
}

/** The recorded run that the page opens with; it needs no model. */
async function playFilm() {
  try {
    const film = await (await fetch("/static/film.json")).json();
    lanes[0].play(film);
    player.begin(film.frames.length);
    player.grow(lanes[0].tape.frames.length);
    player.end();
  } catch { /* an ornament: without it there are masks */ }
  $("lanes").classList.remove("waiting");
}

async function load() {
  try {
    form.setModels(await api.models());
    notice.accepted();
    $("generate").disabled = $("race").disabled = false;
    openLink();
  } catch (error) {
    notice.show(error);
  }
}

listen({
  player, generate, infill, isEditing: cutting.isOpen,
  escape() {
    if (alternatives.isOpen()) alternatives.close();
    else if (runs.isRunning()) runs.stop();
    else cutting.leave();
  },
  clicks: {
    stop: runs.stop, cut: cutting.cut, infill, uncut: cutting.leave, share, undo, before, code: showCode,
    clear: () => { keepHoles(null); $("text").focus(); },
    race: () => valid() && runs.start(raceSettings(settingsNow(), chosen())),
    writing: () => view(false), camefirst: () => view(true),
    savehtml: () => save(() => saveHtml(written().map((lane) => lane.tape))),
    savegif: () => save(() => saveGif(written()[0], goTo, say)),
    dice: () => form.setSeed(newSeed()),
    copycode: async () => { $("copycode").textContent = await copied($("snippet").textContent, "Copy"); },
  },
});
$("text").addEventListener("input", () => { keepHoles(null); typed(); });
$("charts").addEventListener("toggle", () => changed(player.now()));
addEventListener("hashchange", openLink);
// A phone shows the text first; the settings unfold on request.
$("settings").open = matchMedia("(min-width: 60rem)").matches;
drawChips($("chips"), null, true, pick);
layLanes(1);
loadRanks().then((found) => (ranks = found), () => {}).then(() => location.hash || playFilm()).finally(load);
