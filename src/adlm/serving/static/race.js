// The race: two runs of one model on one clock. Both take part in every evaluation of the server, so what differs is how
// many evaluations a text takes. When both are done the model scores them.
import * as api from "./api.js";

const DRAWS = 32; // of noise, for a score
const COLUMNS = ["sampler", "clock", "evaluations", "tokens per evaluation", "nats per token"];

const cell = (text, name = "td") => Object.assign(document.createElement(name), { textContent: text });

/** `board`: where the table stands. */
export function makeRace(board) {
  let began = 0, runners = [], ticking = null;

  function start(lanes) {
    began = performance.now();
    runners = lanes.map((lane) => ({ lane, seconds: null, score: null }));
    board.hidden = false;
    cancelAnimationFrame(ticking);
    tick();
  }

  function tick() {
    draw();
    ticking = runners.some((r) => r.seconds === null) ? requestAnimationFrame(tick) : null;
  }

  /** A runner has its whole text. */
  function arrived(lane) {
    const runner = runners.find((r) => r.lane === lane);
    if (runner) runner.seconds = (performance.now() - began) / 1000;
  }

  /** Nothing more will come. */
  function stop() {
    cancelAnimationFrame(ticking);
    for (const runner of runners) runner.seconds ??= NaN;
    if (runners.length) draw();
  }

  /** The model's own score of both texts: a bound, the lower the likelier. */
  async function judge(model) {
    draw();
    for (const runner of runners) {
      const text = runner.lane.tape?.end?.text;
      if (!text) return;
      runner.score = (await api.score({ model, text, draws: DRAWS })).nll;
      draw();
    }
  }

  function draw() {
    const now = (performance.now() - began) / 1000;
    const best = (values, less) => values.every(Number.isFinite) && Math[less ? "min" : "max"](...values);
    const rows = runners.map(({ lane, seconds, score }) => {
      const { tape } = lane;
      const nfe = lane.empty ? 0 : tape.frames.at(-1)?.nfe ?? 0;
      const drawn = lane.empty ? 0 : tape.tip.ids.filter((id, i) => id !== null && !tape.fixed.has(i)).length;
      return { name: lane.name, values: [seconds ?? now, nfe, nfe ? drawn / nfe : 0, score], done: seconds !== null };
    });
    const done = rows.every((row) => row.done);
    const winners = [true, true, false, true].map((less, c) => done && best(rows.map((r) => r.values[c] ?? NaN), less));
    const show = [(x) => (Number.isFinite(x) ? `${x.toFixed(1)} s` : "stopped"), String, (x) => x.toFixed(2),
      (x) => (x === null ? "…" : x.toFixed(2))];
    const head = document.createElement("tr");
    head.append(...COLUMNS.map((text) => Object.assign(cell(text, "th"), { scope: "col" })));
    const table = document.createElement("table");
    table.append(caption(), head, ...rows.map((row) => {
      const line = document.createElement("tr");
      line.append(Object.assign(cell(row.name, "th"), { scope: "row" }), ...row.values.map((value, c) => {
        const made = cell(show[c](value));
        if (winners[c] !== false && value === winners[c]) made.className = "won";
        return made;
      }));
      return line;
    }));
    board.replaceChildren(table);
  }

  const caption = () => cell("The same model, the same evaluations, one clock. Nats per token: the model's bound for the finished text, lower is likelier.", "caption");

  return { start, arrived, stop, judge, clear() { stop(); runners = []; board.hidden = true; } };
}
