// Wires the parts together: form, runs, lanes, player, plots, link. What each does is in its own module.
import * as api from "./api.js";
import { makeLane } from "./compare.js";
import { makeEditor } from "./editor.js";
import { makeForm } from "./form.js";
import { curve, expectedFrames } from "./frames.js";
import { listen } from "./keys.js";
import { decode, encode } from "./link.js";
import { makeNotice } from "./notice.js";
import { makePlayer } from "./player.js";
import { makePlot } from "./plot.js";
import { bodyFor, firstSettings, newSeed, unknownName } from "./state.js";
import { countHoles, indexAfter, itemsOf, toTemplate, toTokens, toggle } from "./template.js";
import { typedItems } from "./typed.js";

const $ = (id) => document.getElementById(id);
const stillness = matchMedia("(prefers-reduced-motion: reduce)");

let lanes = [];
let last = null; // settings of the run on the canvas, or of the link that was opened
let editing = null; // {lane, fromText} while holes are cut
let controller = null; // of the run in progress
let begun = false; // the run in progress has sent its first canvas
let plotQueued = false;

const form = makeForm($("form"), (name) => {
  if (["compare", "length", "model"].includes(name) && !controller) layLanes();
});
const notice = makeNotice($("notice"), $("unlock"), () => (form.models().length ? start(last ?? form.read()) : load()));
const player = makePlayer({ show, changed }, () => stillness.matches);
const plots = [
  makePlot($("plot-masked"), { column: 1, label: "Fraction of masked tokens against steps", percent: true }, scrubTo),
  makePlot($("plot-nfe"), { column: 2, label: "Network evaluations against steps" }, scrubTo),
];

// Lanes

function layLanes(count = form.read().compare ? 2 : 1) {
  while (lanes.length > count) lanes.pop().root.remove();
  while (lanes.length < count) {
    const lane = makeLane(lanes.length, (from, position) => cutAt(from, position));
    lane.cutter = makeEditor(lane.editor, holesChanged);
    lanes.push(lane);
    $("lanes").append(lane.root);
  }
  $("lanes").classList.toggle("two", count === 2);
  for (const lane of lanes) if (!lane.tape || lane.empty) lane.blank(form.read().length || 64);
  changed(player.now());
}

const written = () => lanes.filter((lane) => lane.tape && !lane.empty);

function show(k) {
  for (const lane of lanes) lane.show(k);
}

function changed({ k, length, playing, live, end }) {
  const slider = $("slider");
  slider.max = end;
  slider.value = k;
  slider.setAttribute("aria-valuetext", written().map((lane) => lane.root.querySelector(".status").textContent).join("; "));
  $("play").classList.toggle("playing", playing);
  $("play").setAttribute("aria-label", playing ? "Pause" : "Play");
  for (const id of ["first", "back"]) $(id).disabled = k === 0;
  for (const id of ["next", "last"]) $(id).disabled = k >= length;
  slider.disabled = $("play").disabled = length === 0 && !live;
  $("cut").disabled = Boolean(controller);
  if (!plotQueued) {
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

// Runs

async function start(settings) {
  stop();
  notice.clear();
  leaveHoles();
  last = settings;
  layLanes(settings.compare ? 2 : 1);
  const mine = (controller = new AbortController());
  begun = false;
  player.begin(Math.max(settings.steps, settings.compare ? settings.steps2 : 0));
  running(true);
  $("announce").textContent = "Writing.";
  const runs = lanes.map((lane, i) => follow(lane, bodyFor(settings, i), mine.signal));
  const failed = (await Promise.allSettled(runs)).find((run) => run.status === "rejected")?.reason;
  if (controller !== mine) return; // another run has begun meanwhile
  controller = null;
  running(false);
  settle();
  if (failed) notice.show(failed);
  $("announce").textContent = failed ? "Stopped." : `Finished. ${written().map((l) => l.tape.end.text).join(" | ")}`;
}

async function follow(lane, body, signal) {
  lane.busy(true);
  try {
    for await (const { event, data } of api.frames(body, signal)) {
      if (signal.aborted) return;
      if (lane.receive(event, data)) {
        player.grow(frameCount());
        $("progress").textContent = "";
      } else {
        begun = true;
        player.expect(Math.max(...written().map((l) => expectedFrames(l.tape.start))));
        lane.show(0);
      }
    }
  } finally {
    lane.busy(false);
  }
}

function stop() {
  if (!controller) return;
  controller.abort();
  controller = null;
  running(false);
  settle();
  $("announce").textContent = "Stopped.";
}

/** Nothing more comes: widths and anchors are known now. A run that never began leaves the text before it in place. */
function settle() {
  player.grow(frameCount());
  player.end();
  if (begun) show(player.now().k);
  else player.go(Infinity);
}

const frameCount = () => Math.max(0, ...written().map((lane) => lane.tape.frames.length));

function running(on) {
  $("generate").hidden = on;
  $("stop").hidden = !on;
  $("progress").textContent = on ? "waiting for the first step" : "";
  if (on && document.activeElement === document.body) $("stop").focus({ preventScroll: true });
  changed(player.now());
}

/** The form as it stands, with a new seed where the reader wants one. */
function settingsNow() {
  if ($("vary").checked) form.setSeed(newSeed());
  return form.read();
}

const valid = () => {
  if (!$("form").checkValidity()) $("settings").open = true; // a field that is out of range must be seen
  return $("form").reportValidity();
};

function generate() {
  if (valid()) start(settingsNow());
}

// Holes

function cutAt(lane, position) {
  if (controller) return;
  const { ids, texts } = lane.state();
  const items = itemsOf(ids, texts);
  let at = 0;
  const index = items.findIndex((item) => (at += item.kind === "hole" ? item.length : item.ids.length) > position);
  const cut = toggle(items, index);
  openHoles(lane, cut, false, indexAfter(items, cut, index));
}

/** The text shown, at any step; or what was typed, when that is newer. */
async function cutHoles() {
  if (controller || editing) return;
  const { text, model } = form.read();
  const [lane] = lanes;
  if (text.trim() && (lane.empty || last?.text !== text)) {
    try {
      openHoles(lane, await typedItems(model, text), true);
    } catch (error) {
      notice.show(error);
    }
  } else if (!lane.empty) {
    player.pause();
    const { ids, texts } = lane.state();
    openHoles(lane, itemsOf(ids, texts), false);
  } else notice.tell("There is no text yet: generate one, or type one, then click words into holes.");
}

function openHoles(lane, items, fromText, at) {
  leaveHoles();
  notice.clear();
  player.pause();
  editing = { lane, fromText };
  lane.canvas.hidden = true;
  lane.editor.hidden = false;
  $("holes").hidden = false;
  lane.cutter.open(items, at);
}

function leaveHoles() {
  if (!editing) return;
  editing.lane.canvas.hidden = false;
  editing.lane.editor.hidden = true;
  editing = null;
  $("holes").hidden = true;
}

function holesChanged(items) {
  const { holes, masks } = countHoles(items);
  $("infill").disabled = holes === 0;
  $("holecount").textContent = holes
    ? `${holes} hole${holes > 1 ? "s" : ""}, ${masks} mask${masks > 1 ? "s" : ""} to fill.`
    : "Click a word to make a hole.";
}

function infill() {
  if (!editing || !valid()) return;
  const items = editing.lane.cutter.items();
  if (!countHoles(items).holes) return;
  const settings = settingsNow();
  if (editing.fromText) {
    settings.text = $("text").value = toTemplate(items);
    start(settings);
  } else start({ ...settings, ...holesNow() });
}

function holesNow() {
  const items = editing.lane.cutter.items();
  return { tokens: toTokens(items), template: toTemplate(items) };
}

// Link

async function share() {
  const settings = form.read();
  // Holes cut into a canvas are no part of the form: they are what the last run filled, or what is being cut now.
  if (editing && !editing.fromText) Object.assign(settings, holesNow());
  else if (last?.tokens && last.text === settings.text) Object.assign(settings, { tokens: last.tokens, template: last.template });
  const fragment = encode(settings, $("runs").checked);
  history.replaceState(null, "", `#${fragment}`);
  try {
    await navigator.clipboard.writeText(location.href);
    $("shared").textContent = "Copied. The address bar holds it too.";
  } catch {
    $("shared").textContent = "It is in the address bar.";
  }
}

function openLink() {
  const { settings, run } = decode(location.hash);
  const models = form.models();
  const named = Object.keys(settings).length > 0;
  const whole = { ...firstSettings(models), ...settings };
  const problem = unknownName(whole, models);
  form.write(whole);
  if ("seed" in settings) $("vary").checked = false;
  layLanes();
  if (problem) return notice.show({ message: `This link names ${problem}, which this server does not have.` });
  last = settings.tokens ? { ...form.read(), tokens: whole.tokens, template: whole.template } : null;
  if (run) start(last ?? form.read());
  else if (last) notice.tell(`A template of ${last.tokens.length} tokens came with this link.`, again("Infill"));
  else if (named) notice.tell("Settings of the link are in place.", again("Run"));
}

function again(text) {
  const button = Object.assign(document.createElement("button"), { type: "button", textContent: text });
  button.addEventListener("click", () => start({ ...form.read(), tokens: last?.tokens ?? null, template: last?.template ?? "" }));
  return button;
}

async function load() {
  try {
    form.setModels(await api.models());
    $("generate").disabled = false;
    openLink();
  } catch (error) {
    layLanes();
    notice.show(error);
  }
}

listen({ player, generate, infill, cutHoles, leaveHoles, stop, share, isEditing: () => Boolean(editing), isRunning: () => Boolean(controller) });
$("dice").addEventListener("click", () => form.setSeed(newSeed()));
addEventListener("hashchange", openLink);
// A phone shows the text first; the settings unfold on request.
$("settings").open = matchMedia("(min-width: 60rem)").matches;
load();
