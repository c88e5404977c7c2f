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

export const hasKey = () => sessionStorage.getItem(KEY) !== null;

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
    throw new ApiError(0, "The server does not answer.");
  }
  if (!response.ok) throw await errorOf(response);
  return response;
}

/** A server's message for a reader: names of settings on its command line are for who runs it. */
export function plain(message) {
  const said = message.replace(/ ?\([^()]*\b(serve|sampling)\.\w[^()]*\)/g, "").replace(/\bsampling\.(\w)/g, "$1");
  return said.charAt(0).toUpperCase() + said.slice(1) + (/[.!?]$/.test(said) ? "" : ".");
}

async function errorOf(response) {
  const said = await response.json().then((body) => body?.error?.message ?? body?.detail, () => null);
  const message = typeof said === "string" && said ? plain(said) : `The server answered ${response.status}.`;
  const wait = Number(response.headers.get("Retry-After"));
  return new ApiError(response.status, message, Number.isFinite(wait) && wait > 0 ? wait : null);
}

const post = (path, body, signal) => request(path, { method: "POST", body: JSON.stringify(body), signal });

export const models = async () => (await (await request("/v1/models")).json()).data;

/** Whether the server is there and takes work. */
export const ready = () => fetch("/readyz").then((response) => response.ok, () => false);

export const infill = async (body, signal) => (await post("/v1/infill", body, signal)).json();

export const score = async (body) => (await post("/v1/score", body)).json();

export const tokenize = async (model, text) => (await post("/v1/tokenize", { model, text })).json();

/** The events of one run: {event, data}; an error event is thrown. Aborting the signal frees the server's slot. */
export async function* frames(body, signal) {
  const response = await post("/v1/frames", body, signal);
  let ended = false;
  try {
    for await (const { event, data } of readEvents(response)) {
      if (event === "error") throw new ApiError(data.status ?? 500, plain(data.message ?? "The run failed."));
      ended ||= event === "end";
      yield { event, data };
    }
  } catch (error) {
    if (error instanceof ApiError || error.name === "AbortError") throw error;
    throw new ApiError(0, "The server went away before the text was finished.");
  }
  if (!ended) throw new ApiError(0, "The server went away before the text was finished.");
}
