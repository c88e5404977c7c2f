// Errors in one line, where the reader looks; a full server says when to come back, a locked one asks for its key.
import { setKey } from "./api.js";

export function makeNotice(line, unlock, retry) {
  let timer = null;

  function clear() {
    clearInterval(timer);
    line.hidden = unlock.hidden = true;
    line.replaceChildren();
  }

  /** A line that is no error. */
  function tell(message, ...more) {
    say(message, ...more);
    line.classList.add("info");
  }

  function say(message, ...more) {
    clear();
    line.hidden = false;
    line.classList.remove("info");
    line.append(message, ...more);
  }

  /** The server is full: count down, then offer to try again. */
  function wait(seconds) {
    const button = Object.assign(document.createElement("button"), { type: "button", textContent: "Try again" });
    const text = document.createElement("span");
    let left = Math.ceil(seconds);
    const tick = () => {
      text.textContent = left > 0 ? `The server is full. Try again in ${left} s. ` : "The server was full. ";
      button.disabled = left > 0;
      if (left-- <= 0) clearInterval(timer);
    };
    say("", text, button);
    tick();
    timer = setInterval(tick, 1000);
    button.addEventListener("click", () => { clear(); retry(); });
  }

  function show(error) {
    if (error.status === 401) {
      clear();
      unlock.hidden = false;
      unlock.querySelector("input").focus();
    } else if (error.status === 429) wait(error.retryAfter ?? 5);
    else say(error.message);
  }

  const send = () => {
    const input = unlock.querySelector("input");
    setKey(input.value.trim());
    input.value = "";
    clear();
    retry();
  };
  unlock.querySelector("button").addEventListener("click", send);
  unlock.querySelector("input").addEventListener("keydown", (event) => {
    if (event.key !== "Enter") return;
    event.preventDefault(); // the field stands inside the form of the page
    send();
  });

  return { show, tell, clear };
}
