// Errors in one line, where the reader looks. A full server says when to come back, a lost one is looked for, a locked
// one asks for its key.
import { ready, setKey } from "./api.js";

const LOOK_AGAIN = 1500; // milliseconds between two looks for a lost server

export function makeNotice(line, unlock, retry) {
  let timer = null;
  const input = unlock.querySelector("input"), label = unlock.querySelector("label");

  function clear() {
    clearTimeout(timer);
    timer = null;
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

  function again(text = "Try again") {
    const button = Object.assign(document.createElement("button"), { type: "button", textContent: text });
    button.addEventListener("click", () => { clear(); retry(); });
    return button;
  }

  /** The server is full: count down, then offer to try again. */
  function wait(seconds) {
    const button = again(), text = document.createElement("span");
    let left = Math.ceil(seconds);
    const tick = () => {
      text.textContent = left > 0 ? `The server is full. There should be room in ${left} s.` : "There should be room now.";
      button.disabled = left > 0;
      if (left-- > 0) timer = setTimeout(tick, 1000);
    };
    say("", text, button);
    tick();
  }

  /** The server is gone: look for it, and say when it is back. The same seed gives the same text. */
  function lost(message) {
    const text = document.createElement("span");
    text.textContent = `${message} Looking for it …`;
    say("", text, again());
    const look = async () => {
      const back = await ready();
      if (timer === null) return; // somebody pressed the button meanwhile
      if (back) text.textContent = "The server is back. The same text can be written again.";
      else timer = setTimeout(look, LOOK_AGAIN);
    };
    timer = setTimeout(look, LOOK_AGAIN);
  }

  function show(error) {
    if (error.status === 401) {
      const tried = input.value !== "";
      clear();
      label.textContent = tried ? "The server does not accept that key." : "This server asks for a key.";
      unlock.classList.toggle("info", !tried);
      unlock.hidden = false;
      input.setAttribute("aria-invalid", tried);
      input.focus();
      input.select();
    } else if (error.status === 429) wait(error.retryAfter ?? 5);
    else if (error.status === 0 || error.status === 503) lost(error.message);
    else say(error.message);
  }

  /** The key was right: it need not stay in the page. */
  function accepted() {
    input.value = "";
  }

  const send = () => {
    setKey(input.value.trim());
    clear();
    retry();
  };
  unlock.querySelector("button").addEventListener("click", send);
  input.addEventListener("keydown", (event) => {
    if (event.key !== "Enter") return;
    event.preventDefault(); // the field stands inside the form of the page
    send();
  });

  return { show, tell, clear, accepted };
}
