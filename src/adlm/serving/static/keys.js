// Buttons and keys of the page.
const $ = (id) => document.getElementById(id);

export function listen(page) {
  const { player } = page;
  const dialog = $("keys");

  $("form").addEventListener("submit", (event) => {
    event.preventDefault();
    if (page.isEditing()) page.infill();
    else if (!$("generate").disabled) page.generate();
  });
  const clicks = { ...page.clicks, play: () => player.toggle(), help: () => dialog.showModal() };
  for (const [id, act] of Object.entries(clicks)) $(id).addEventListener("click", act);
  $("slider").addEventListener("input", (event) => player.go(Number(event.target.value)));
  $("speed").addEventListener("change", (event) => player.speed(Number(event.target.value)));
  $("text").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("form").requestSubmit();
  });

  document.addEventListener("keydown", (event) => {
    if (document.querySelector("dialog[open]") || event.defaultPrevented) return;
    if (event.key === "Escape") {
      page.escape();
      return;
    }
    // Fields keep their own keys, the slider its arrows, and a focused button its space bar.
    const typing = event.target.matches("input, textarea, select") && !(event.target.id === "slider" && event.key === " ");
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && !event.target.matches("textarea")) {
      event.preventDefault();
      $("form").requestSubmit();
    }
    if (!typing && (event.ctrlKey || event.metaKey) && event.key === "z") {
      event.preventDefault();
      page.clicks.undo();
    }
    if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
    const far = event.shiftKey ? 10 : 1;
    const actions = {
      "ArrowLeft": () => player.step(-far),
      "ArrowRight": () => player.step(far),
      "Home": () => player.go(0),
      "End": () => player.go(Infinity),
      "h": page.clicks.cut,
      "f": () => page.clicks[$("camefirst").ariaPressed === "true" ? "writing" : "camefirst"](),
      "?": () => dialog.showModal(),
      ...(event.target.matches("button, summary, a") ? {} : { " ": () => player.toggle() }),
    };
    const act = actions[event.key];
    if (!act || page.isEditing()) return;
    event.preventDefault();
    act();
  });
}
