// The server's routes. Addresses are relative to the page's, so that it works behind a path of a proxy.

import { eventData } from "./sse.js";
import { forThisTab } from "./store.js";

/** The server has answered, and refused. */
export class Refused extends Error {
  constructor(status, message, retryAfter) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter; // seconds, or null
  }
}

/** No answer, or one that broke off. */
export class ConnectionLost extends Error {}

export const apiKey = {
  get: () => forThisTab.get("key", ""),
  set: (key) => forThisTab.set("key", key || null),
};

async function ask(path, { body, signal } = {}) {
  const headers = {};
  if (apiKey.get()) headers.Authorization = `Bearer ${apiKey.get()}`;
  if (body) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(path, {
      method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal, cache: "no-store",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ConnectionLost(error.message);
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

async function refusal(response) {
  const after = Number.parseFloat(response.headers.get("Retry-After"));
  const text = await response.text().catch(() => "");
  let message = text || response.statusText;
  try {
    const { error } = JSON.parse(text);
    message = error.message ?? error;
  } catch {
    // a proxy's page, or nothing
  }
  return new Refused(response.status, String(message).slice(0, 2000), Number.isFinite(after) ? after : null);
}

/** "ready", "loading" or "gone". Needs no key. */
export async function health() {
  try {
    const response = await fetch("v2/health/ready", { cache: "no-store" });
    await response.text(); // of a body that nobody reads the browser says that it failed
    return response.ok ? "ready" : "loading";
  } catch {
    return "gone";
  }
}

/** Of those that talk; where there are none, of all. */
export async function modelNames() {
  const { data } = await (await ask("v1/models")).json();
  const talking = data.filter((model) => !model.engine?.pooling);
  return (talking.length ? talking : data).map((model) => model.id);
}

/** The models that an ensemble is made of, itself among them; `model` can be another name of it, or its adapter's. */
export async function partsOf(model) {
  const { root } = await (await ask(`v1/models/${encodeURIComponent(model)}`)).json();
  const config = await (await ask(`v2/models/${encodeURIComponent(root)}/config`)).json();
  const steps = config.ensemble_scheduling?.step ?? [];
  return [root, ...steps.map((step) => step.model_name)];
}

export async function metricsText() {
  return (await ask("metrics")).text();
}

/** The chunks of a chat completion. A stream that breaks off is a `ConnectionLost`. */
export async function* chatChunks(request, signal) {
  const response = await ask("v1/chat/completions", { body: { ...request, stream: true }, signal });
  try {
    for await (const data of eventData(response.body)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Refused(response.status, chunk.error.message, null);
      yield chunk;
    }
  } catch (error) {
    if (error instanceof Refused || error.name === "AbortError") throw error;
    throw new ConnectionLost(error.message);
  }
  throw new ConnectionLost("the stream ended too early");
}
