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
  const clicks = {
    stop: page.stop, cut: page.cutHoles, infill: page.infill, uncut: page.leaveHoles, share: page.share,
    first: () => player.go(0), last: () => player.go(Infinity), back: () => player.step(-1), next: () => player.step(1),
    play: () => player.toggle(), help: () => dialog.showModal(),
  };
  for (const [id, act] of Object.entries(clicks)) $(id).addEventListener("click", act);
  $("slider").addEventListener("input", (event) => player.go(Number(event.target.value)));
  $("speed").addEventListener("change", (event) => player.speed(Number(event.target.value)));
  $("text").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("form").requestSubmit();
  });

  document.addEventListener("keydown", (event) => {
    if (dialog.open || event.defaultPrevented) return;
    if (event.key === "Escape") {
      if (page.isRunning()) page.stop();
      else page.leaveHoles();
      return;
    }
    // Fields keep their own keys, the slider its arrows, and a focused button its space bar.
    const typing = event.target.matches("input, textarea, select") && !(event.target.id === "slider" && event.key === " ");
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && !event.target.matches("textarea")) {
      event.preventDefault();
      $("form").requestSubmit();
    }
    if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
    const far = event.shiftKey ? 10 : 1;
    const actions = {
      "ArrowLeft": () => player.step(-far),
      "ArrowRight": () => player.step(far),
      "Home": () => player.go(0),
      "End": () => player.go(Infinity),
      "h": page.cutHoles,
      "?": () => dialog.showModal(),
      ...(event.target.matches("button, summary, a") ? {} : { " ": () => player.toggle() }),
    };
    const act = actions[event.key];
    if (!act || page.isEditing()) return;
    event.preventDefault();
    act();
  });
}
