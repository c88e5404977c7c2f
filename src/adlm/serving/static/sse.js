// Server-sent events read from a fetch: EventSource cannot POST a body or send a key.

/** A parser fed with pieces of text of any size; `push` returns the events completed so far as {event, data}. */
export function makeParser() {
  let buffer = "", event = "message", data = [];

  function line(text, found) {
    if (text === "") {
      if (data.length) found.push({ event, data: data.join("\n") });
      event = "message";
      data = [];
      return;
    }
    const colon = text.indexOf(":");
    if (colon === 0) return; // a comment: servers send them to keep the connection alive
    const field = colon < 0 ? text : text.slice(0, colon);
    const value = colon < 0 ? "" : text.slice(colon + 1).replace(/^ /, "");
    if (field === "event") event = value;
    else if (field === "data") data.push(value);
  }

  function push(text) {
    const found = [];
    buffer += text;
    // A carriage return at the very end may be half of a line break: it waits for the next piece.
    let match;
    while ((match = /\r\n|\n|\r(?!$)/.exec(buffer))) {
      line(buffer.slice(0, match.index), found);
      buffer = buffer.slice(match.index + match[0].length);
    }
    return found;
  }

  return { push };
}

/** Events of a response as they arrive, their data decoded from JSON. */
export async function* readEvents(response) {
  const parser = makeParser();
  const reader = response.body.getReader();
  const decoder = new TextDecoder();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      const text = done ? decoder.decode() + "\n\n" : decoder.decode(value, { stream: true });
      for (const { event, data } of parser.push(text)) {
        if (data !== "[DONE]") yield { event, data: JSON.parse(data) };
      }
      if (done) return;
    }
  } finally {
    // Leaving early must close the connection: the server then frees the slot.
    reader.cancel().catch(() => {});
  }
}
