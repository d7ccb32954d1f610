// One answer while it comes, and what is known about it afterwards: plain data, which the tab can keep.

import { chatChunks, ConnectionLost, Refused } from "./api.js";
import { DEFAULT_LIMIT } from "./settings.js";

export const UNDER_WAY = ["waiting", "writing"];

/** To a request. */
export function newAnswer({ response_format: format, structured_outputs: outputs }) {
  return {
    role: "assistant",
    content: "",
    thoughts: "", // of a model that thinks before it answers
    tokens: null, // with their probabilities, where those were asked for
    isPlain: Boolean(format ?? outputs), // JSON or the like: no Markdown
    pieces: 0, // that have come; about as many as tokens
    state: "waiting", // or writing; then done, stopped, refused or lost
    problem: "",
    status: 0, // of a refusal
    retryAfter: null, // seconds
    finish: "", // the server's reason
    warning: "",
    usage: null,
    firstAfter: null, // milliseconds until something came
    lastAfter: null, // and until the last piece did
  };
}

/** Asks, and fills `answer` in; `changed` is called after each piece. Never throws: an answer says what went wrong. */
export async function receive(answer, request, { signal, changed }) {
  const began = performance.now();
  try {
    for await (const chunk of chatChunks(request, signal)) {
      add(answer, chunk, performance.now() - began);
      changed();
    }
    answer.state = "done";
  } catch (error) {
    fail(answer, error, signal);
  }
  changed();
}

function add(answer, chunk, now) {
  if (chunk.usage) answer.usage = chunk.usage;
  if (chunk.warning) answer.warning = worthTelling(chunk.warning);
  const [choice] = chunk.choices ?? [];
  if (!choice) return;
  if (choice.finish_reason) answer.finish = choice.finish_reason;
  const scored = choice.logprobs?.content ?? [];
  const text = choice.delta.content ?? "";
  const thought = choice.delta.reasoning_content ?? "";
  if (!text && !thought && !scored.length) return;
  if (text || scored.length) answer.state = "writing";
  answer.firstAfter ??= now;
  answer.lastAfter = now;
  answer.content += text;
  answer.thoughts += thought;
  answer.pieces += scored.length || 1;
  if (scored.length) (answer.tokens ??= []).push(...scored.map(compact));
}

/** Without that there is less room than a limit that nobody has asked for. */
function worthTelling(warning) {
  return warning.split("; ").filter((each) => !each.startsWith(`max_tokens is ${DEFAULT_LIMIT},`)).join("; ");
}

/** A token as it is kept: its bytes, its log prob, and the likeliest in its place. */
function compact({ bytes, token, logprob, top_logprobs: top }) {
  return { bytes, token, logprob, top: (top ?? []).map(({ token: other, logprob: value }) => [other, value]) };
}

function fail(answer, error, signal) {
  if (signal.aborted) {
    answer.state = "stopped";
  } else if (error instanceof Refused) {
    answer.state = "refused";
    answer.status = error.status;
    answer.problem = error.message;
    answer.retryAfter = error.retryAfter;
  } else {
    if (!(error instanceof ConnectionLost)) console.error(error);
    answer.state = "lost";
    answer.problem = error.message;
  }
}

/** Tokens that were counted, and whether by the server. */
export function tokenCount(answer) {
  const counted = answer.usage?.completion_tokens;
  return { count: counted ?? answer.tokens?.length ?? answer.pieces, exact: counted !== undefined || answer.tokens !== null };
}

/** Tokens a second after the first; null while that says nothing. */
export function tokensPerSecond(answer) {
  const { count } = tokenCount(answer);
  const seconds = (answer.lastAfter - answer.firstAfter) / 1000;
  return count > 1 && seconds > 0 ? (count - 1) / seconds : null;
}
