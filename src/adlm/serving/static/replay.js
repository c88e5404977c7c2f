// What a saved run does when it is opened: play, stand still, be scrubbed, show what came first.
import { makeCanvas } from "./canvas.js";
import { fromEvents, totalSteps } from "./frames.js";
import { makePlayer } from "./player.js";

const $ = (id) => document.getElementById(id);

export function replay() {
  const lanes = JSON.parse($("run").textContent).map((events, i) => {
    const canvas = makeCanvas(document.querySelectorAll(".canvas")[i]);
    canvas.tape = fromEvents(events);
    canvas.reset(canvas.tape);
    return canvas;
  });
  const still = matchMedia("(prefers-reduced-motion: reduce)");
  const player = makePlayer({
    show(k) {
      lanes.forEach((lane, i) => {
        const { step, nfe } = lane.show(k);
        document.querySelectorAll(".status")[i].textContent = `step ${step} of ${totalSteps(lane.tape)}, ${nfe} evaluations`;
      });
    },
    changed({ k, length, playing }) {
      $("slider").max = length;
      $("slider").value = k;
      $("play").classList.toggle("playing", playing);
      $("play").setAttribute("aria-label", playing ? "Pause" : "Play");
    },
  }, () => still.matches);
  const frames = Math.max(...lanes.map((lane) => lane.tape.frames.length));
  player.begin(frames);
  player.grow(frames);
  player.end();
  $("play").addEventListener("click", () => player.toggle());
  $("slider").addEventListener("input", (event) => player.go(Number(event.target.value)));
  $("speed").addEventListener("change", (event) => player.speed(Number(event.target.value)));
  const views = [$("writing"), $("camefirst")];
  views.forEach((button, first) => button.addEventListener("click", () => {
    views.forEach((other) => other.setAttribute("aria-pressed", other === button));
    $("legend").hidden = Boolean(first);
    $("legendfirst").hidden = !first;
    for (const lane of lanes) lane.whatCameFirst(Boolean(first));
  }));
}

if (document.getElementById("run")) replay();
