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
    usage: null, // the server's counts
    firstAfter: null, // milliseconds until something came
    lastAfter: null, // and until the last piece did
  };
}

/** What was said of its end is void; its words stay. */
export function restart(answer) {
  Object.assign(answer, { state: "waiting", problem: "", status: 0, retryAfter: null, finish: "", warning: "" });
}

/** Whether more of it can be asked for: it was cut or broken off, after some words that are no form's. */
export function canGoOn({ role, state, finish, content, isPlain }) {
  const isCut = state === "done" ? finish === "length" : !UNDER_WAY.includes(state);
  return role === "assistant" && isCut && content !== "" && !isPlain;
}

/** Asks, and fills `answer` in, or goes on with it; `changed` is called after each piece. Never throws: an answer says
 * what went wrong. */
export async function receive(answer, request, { signal, changed }) {
  const before = { ...answer };
  const began = performance.now() - (answer.lastAfter ?? 0);
  try {
    for await (const chunk of chatChunks(request, signal)) {
      add(answer, chunk, performance.now() - began);
      if (chunk.usage) answer.usage = counts(chunk.usage, before);
      changed();
    }
    answer.state = "done";
  } catch (error) {
    fail(answer, error, signal);
  }
  changed();
}

function add(answer, chunk, now) {
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

/** Of the whole, where an answer was gone on with. */
function counts({ prompt_tokens, completion_tokens, prompt_tokens_details: details, ...more }, { content, usage }) {
  const { accepted_prediction_tokens: accepted = 0, rejected_prediction_tokens: rejected = 0 } =
    more.completion_tokens_details ?? {};
  const drafts = { drafted_tokens: accepted + rejected, accepted_tokens: accepted };
  if (!content) return { prompt_tokens, completion_tokens, cached_tokens: details?.cached_tokens ?? 0, ...drafts };
  return usage && {
    ...usage,
    completion_tokens: usage.completion_tokens + completion_tokens,
    drafted_tokens: usage.drafted_tokens + drafts.drafted_tokens,
    accepted_tokens: usage.accepted_tokens + drafts.accepted_tokens,
  };
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
