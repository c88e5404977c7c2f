// Runs: ask the server, follow the frames into the lanes, say how it goes, stop.
import * as api from "./api.js";
import { expectedFrames } from "./frames.js";
import { bodyFor } from "./state.js";

const $ = (id) => document.getElementById(id);

/** page: {lanes(), written(), show(k), changed(), prepare(settings), edited(), player, notice, race}. */
export function makeRuns(page) {
  const { player, notice, race } = page;
  let controller = null; // of the run in progress
  let begun = false; // it has sent its first canvas

  /** `keep`: the text it replaces can be brought back. */
  async function start(settings, keep = false) {
    stop();
    notice.clear();
    page.prepare(settings);
    for (const lane of page.lanes()) {
      lane.loosen();
      lane.keepPast = keep;
    }
    const mine = (controller = new AbortController());
    begun = false;
    player.begin(Math.max(settings.steps, settings.compare ? settings.steps2 : 0));
    running(true);
    const lanes = page.lanes();
    if (settings.race) race.start(lanes);
    else race.clear();
    const failed = (await Promise.allSettled(lanes.map((lane, i) => follow(lane, bodyFor(settings, i), mine.signal))))
      .find((run) => run.status === "rejected")?.reason;
    if (controller !== mine) return; // another run has begun meanwhile
    controller = null;
    running(false);
    settle();
    if (failed) {
      race.stop();
      notice.show(failed);
    } else if (settings.race) race.judge(settings.model).catch(notice.show);
    $("announce").textContent = failed ? "Stopped." : `Finished. ${page.written().map((l) => l.tape.end.text).join(" | ")}`;
  }

  async function follow(lane, body, signal) {
    lane.busy(true);
    try {
      for await (const { event, data } of api.frames(body, signal)) {
        if (signal.aborted) return;
        if (event === "queue") say(`Number ${data.position} in the queue.`);
        else if (lane.receive(event, data)) {
          if (event === "end") race.arrived(lane);
          player.grow(frameCount());
          say("");
        } else {
          notice.accepted();
          page.edited();
          begun = true;
          player.expect(Math.max(...page.written().map((l) => expectedFrames(l.tape.start))));
          lane.show(0);
        }
      }
    } finally {
      lane.busy(false);
    }
  }

  const say = (text) => { if ($("said").textContent !== text) $("said").textContent = text; };

  function stop() {
    if (!controller) return;
    controller.abort();
    controller = null;
    running(false);
    race.stop();
    settle();
    $("announce").textContent = "Stopped.";
  }

  /** Nothing more comes: widths and rare words are known now. A run that never began leaves the text before it in place. */
  function settle() {
    player.grow(frameCount());
    player.end();
    if (begun) page.show(player.now().k);
    else player.go(Infinity);
  }

  const frameCount = () => Math.max(0, ...page.written().map((lane) => lane.tape.frames.length));

  function running(on) {
    $("generate").hidden = on;
    $("stop").hidden = !on;
    say(on ? "Waiting for the first step." : "");
    if (on) $("announce").textContent = "Writing.";
    page.changed();
  }

  return { start, stop, frameCount, isRunning: () => Boolean(controller) };
}
