// A run as a file: one HTML page that plays it anywhere, or a GIF.
import { bundle } from "./bundle.js";
import { toEvents } from "./frames.js";
import { encodeGif } from "./gif.js";
import { drawLane } from "./picture.js";
import { pace } from "./player.js";

const $ = (id) => document.getElementById(id);
const GIF_FRAMES = 60;
const LAST_FRAME = 2500; // milliseconds that the finished text stands
const read = async (name) => (await fetch(`/static/${name}`)).text();
const escaped = (text) => text.replace(/[&<>"]/g, (c) => `&#${c.charCodeAt(0)};`);

export function download(name, parts, type) {
  const link = Object.assign(document.createElement("a"), { href: URL.createObjectURL(new Blob(parts, { type })), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

const nameOf = ({ model, sampler, seed }) => `${model}-${sampler}-${seed}`.replace(/[^\w.-]+/g, "-");

/** The page that plays these tapes. It loads nothing and may load nothing. */
export async function htmlOf(tapes) {
  const css = (await Promise.all(["style.css", "canvas.css"].map(read))).join("\n");
  const script = (await bundle("replay.js", read)).replaceAll("</", "<\\/");
  const run = JSON.stringify(tapes.map(toEvents)).replaceAll("<", "\\u003c");
  const lanes = tapes.map(({ start }) => `<h2>${escaped(`${start.sampler} · ${start.model} · seed ${start.seed}`)}</h2>
<p class="passage canvas"></p><p class="status"></p>`).join("\n");
  return `<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<title>A text appears</title><style>${css}
.passage { min-height: 0; } .switch { margin: .8rem 0; } h2 { font-size: .95rem; color: var(--soft); }</style></head>
<body><main><section>${$("transport").outerHTML}${lanes}
${document.querySelector(".switch").outerHTML}${$("legend").outerHTML}${$("legendfirst").outerHTML}</section>
<p><small>Recorded with adlm. The same settings and seed give the same text.</small></p></main>
<script type="application/json" id="run">${run}</script>
<script type="module">${script}</script></body></html>`;
}

export async function saveHtml(tapes) {
  download(`${nameOf(tapes[0].start)}.html`, [await htmlOf(tapes)], "text/html");
}

/** The first lane, as it looks on the page. `goTo(k)` shows a frame. */
export async function gifOf(lane, goTo, say) {
  const { frames } = lane.tape;
  const count = Math.min(GIF_FRAMES, frames.length);
  const indices = Array.from({ length: count + 1 }, (_, i) => Math.round((i * frames.length) / count));
  const pictures = [];
  lane.canvas.classList.add("still");
  try {
    for (const k of indices) {
      goTo(k);
      pictures.push(drawLane(lane.canvas));
      if (pictures.length % 8 === 0) {
        say(`Drawing ${pictures.length} of ${indices.length} …`);
        await new Promise((resolve) => setTimeout(resolve));
      }
    }
  } finally {
    lane.canvas.classList.remove("still");
  }
  const gap = pace(count);
  return encodeGif(pictures, indices.map((_, i) => (i === indices.length - 1 ? LAST_FRAME : gap)));
}

export async function saveGif(lane, goTo, say) {
  download(`${nameOf(lane.tape.start)}.gif`, [await gifOf(lane, goTo, say)], "image/gif");
}
