"use strict";
// One player per .reveal element: canvas of spans, a slider over the frames, a play button.
for (const box of document.querySelectorAll(".reveal")) {
  const data = JSON.parse(box.querySelector("script").textContent);
  const spans = box.querySelectorAll(".canvas mark");
  const slider = box.querySelector("input"), output = box.querySelector("output"), button = box.querySelector("button");
  const hole = "\u00b7\u00b7\u00b7";
  let shown = -1, timer = null;

  const put = (i, text, fresh) => {
    spans[i].textContent = text === null ? hole : text;
    spans[i].className = text === null ? "hole" : fresh ? "new" : "";
  };
  const show = (n) => {
    if (n < shown || shown < 0) {
      for (let i = 0; i < data.length; i++) put(i, null, false);
      shown = 0;
    }
    for (const span of box.querySelectorAll(".canvas .new")) span.className = "";
    for (; shown < n; shown++) {
      for (const [i, text] of data.frames[shown][1]) put(i, text, shown === n - 1);
    }
    const step = n === 0 ? 0 : data.frames[n - 1][0];
    const open = box.querySelectorAll(".canvas .hole").length;
    output.textContent = n === data.frames.length ? "done" : "step " + step + ", " + open + " masks";
    slider.value = n;
    slider.setAttribute("aria-valuetext", output.textContent);
  };
  const stop = () => { clearInterval(timer); timer = null; button.textContent = "Play"; };
  const play = () => {
    if (shown >= data.frames.length) show(0);
    button.textContent = "Pause";
    const pause = Math.max(40, Math.min(200, 8000 / data.frames.length));
    timer = setInterval(() => { show(shown + 1); if (shown >= data.frames.length) stop(); }, pause);
  };
  button.addEventListener("click", () => (timer === null ? play() : stop()));
  slider.addEventListener("input", () => { stop(); show(Number(slider.value)); });
  box.addEventListener("keydown", (event) => {
    if (event.key === " " && event.target !== button) { event.preventDefault(); button.click(); }
  });
  box.querySelector(".controls").hidden = false;
  show(data.frames.length);
  // The finished text is the tallest canvas: what follows must not jump about while it is written.
  const canvas = box.querySelector(".canvas");
  const keep = () => {
    const now = shown;
    canvas.style.minHeight = "";
    show(data.frames.length);
    canvas.style.minHeight = canvas.offsetHeight + "px";
    show(now);
  };
  keep();
  addEventListener("resize", keep);
  // Starts when it is first seen, unless the reader asked for stillness.
  if (!matchMedia("(prefers-reduced-motion: reduce)").matches && "IntersectionObserver" in window) {
    const seen = new IntersectionObserver((entries) => {
      if (entries.some((entry) => entry.isIntersecting)) { seen.disconnect(); show(0); play(); }
    }, { threshold: 0.5 });
    seen.observe(box);
  }
}
