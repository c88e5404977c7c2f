// Requests to the server that sent the page, and its errors as one line.
import { readEvents } from "./sse.js";

const KEY = "adlm-key"; // sessionStorage: forgotten with the tab

export class ApiError extends Error {
  constructor(status, message, retryAfter = null) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

export const setKey = (key) => (key ? sessionStorage.setItem(KEY, key) : sessionStorage.removeItem(KEY));

async function request(path, options = {}) {
  const key = sessionStorage.getItem(KEY);
  const headers = { ...(options.body ? { "Content-Type": "application/json" } : {}) };
  if (key) headers.Authorization = `Bearer ${key}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The server does not answer. Is it still running?");
  }
  if (!response.ok) throw await errorOf(response);
  return response;
}

async function errorOf(response) {
  const said = await response.json().then((body) => body?.error?.message ?? body?.detail, () => null);
  const message = typeof said === "string" && said ? said : `The server answered ${response.status}.`;
  const wait = Number(response.headers.get("Retry-After"));
  return new ApiError(response.status, message, Number.isFinite(wait) && wait > 0 ? wait : null);
}

const post = (path, body, signal) => request(path, { method: "POST", body: JSON.stringify(body), signal });

export const models = async () => (await (await request("/v1/models")).json()).data;

export const tokenize = async (model, text) => (await post("/v1/tokenize", { model, text })).json();

/** The events of one run: {event, data}; an error event is thrown. Aborting the signal frees the server's slot. */
export async function* frames(body, signal) {
  const response = await post("/v1/frames", body, signal);
  let ended = false;
  for await (const { event, data } of readEvents(response)) {
    if (event === "error") throw new ApiError(data.status ?? 500, data.message ?? data.error?.message ?? "The run failed.");
    ended ||= event === "end";
    yield { event, data };
  }
  if (!ended) throw new ApiError(0, "The connection ended before the text was finished.");
}
